"""Certificates of workers and ledgers: a real hub's enrolment, restarts, renewal, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from unknown_nodes import node, token_for, working

from p2pcast.daemon.http_caller import certified_caller
from p2pcast.ground.errors import RefusedError, UntrustedError, UsageError
from p2pcast.transport import node_certificate
from p2pcast.transport.enrolment import enrol
from p2pcast.transport.node_certificate import FILE, IDENTITY, KEY, TOKEN, NodeCertificate
from p2pcast.trust.certificates import key_print
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.join_token import JoinToken


@contextlib.asynccontextmanager
async def renewing(swarm, certificate: NodeCertificate) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Yields ``swarm.until``, which fails at once if the renewals end."""
    work = asyncio.create_task(certificate.renew_when_due())

    async def until(condition: Callable[[], bool], what: str) -> None:
        await swarm.until(lambda: work.done() or condition(), what)
        assert not work.done(), work.exception()

    try:
        yield until
    finally:
        work.cancel()


def expire(hub, token: JoinToken) -> None:
    hub.state.admission.trust.ledger.tokens[token.ident.hex()].expires = time.time() - 1


class Ledger:
    """An HTTPS server of the run. ``shown``: the caller's certificate in each request."""

    def __init__(self, certificate: NodeCertificate) -> None:
        self.certificate = certificate
        self.callers: list[object] = []
        self.shown: list[bytes] = []

    async def _answer(self, request: web.Request) -> web.Response:
        self.callers.append(certified_caller(request, self.certificate.who.run))
        self.shown.append(request.transport.get_extra_info("ssl_object").getpeercert(binary_form=True))
        return web.Response(text="ok")

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self.certificate.tls.server).start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}/"
        await runner.cleanup()


async def ask(session: aiohttp.ClientSession, url: str, worker: NodeCertificate) -> str:
    async with session.post(url, ssl=worker.client("ledger")) as answer:
        return await answer.text()


async def test_worker_and_ledger_of_a_run_meet(tls):
    hub = await tls.hub_up()
    worker = await working(tls, await token_for(hub, "worker"))
    ledger = Ledger(await working(tls, await token_for(hub, "ledger"), "ledger", "l"))
    async with ledger.serving() as url, aiohttp.ClientSession() as session:
        assert await ask(session, url, worker) == "ok"
    assert ledger.callers == [worker.who]
    assert worker.who.role == "worker"


async def test_a_worker_does_not_pass_for_the_ledger(tls):
    hub = await tls.hub_up()
    token = await token_for(hub, "worker")
    worker, thief = await working(tls, token), Ledger(await working(tls, token, folder="thief"))
    async with thief.serving() as url, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(session, url, worker)
    assert thief.callers == []


async def test_the_next_start_needs_neither_hub_nor_token(tls):
    hub = await tls.hub_up()
    first = await working(tls, await token_for(hub, "worker"))
    await tls.down(hub)
    second = node(tls, None)
    await second.ready()
    assert (second.who, second.until) == (first.who, first.until)
    for name in (IDENTITY, KEY, FILE, TOKEN):
        assert (tls.folder / "w" / name).stat().st_mode & 0o777 == 0o600


async def test_the_first_start_needs_a_token_of_an_encrypted_run(tls):
    tls.address = ("127.0.0.1", 1)
    with pytest.raises(UsageError, match="token create --role worker"):
        node(tls, None)
    with pytest.raises(UsageError, match="--plaintext"):
        node(tls, JoinToken(bytes(16), bytes(20)))


@pytest.mark.parametrize(("role", "asked"), [("peer", "worker"), ("worker", "ledger"), ("ledger", "worker")])
async def test_a_token_of_another_role_gives_no_certificate(tls, role, asked):
    hub = await tls.hub_up()
    with pytest.raises(RefusedError, match=f"admits as {role}, not as {asked}: .*--role {asked}"):
        await working(tls, await token_for(hub, role), asked)
    assert not (tls.folder / "w" / FILE).exists()


async def test_a_token_of_another_run_gives_no_certificate(tls):
    hub = await tls.hub_up()
    token = await token_for(hub, "worker")
    with pytest.raises(UntrustedError, match="another run's hub"):
        await working(tls, JoinToken(token.run, token.secret, bytes(32)))


async def test_a_certificate_of_another_run_in_the_folder_is_not_used(tls):
    hub = await tls.hub_up()
    token = await token_for(hub, "worker")
    first = await working(tls, token)
    assert node(tls, token).until == first.until
    assert node(tls, JoinToken(b"R" * 16, token.secret, token.authority)).until is None
    assert node(tls, JoinToken(token.run, token.secret, bytes(32))).until is None


async def test_a_worker_waits_for_its_hub(tls, caplog):
    hub = await tls.hub_up()
    token = await token_for(hub, "worker")
    await tls.down(hub)
    worker = node(tls, token)
    waiting = asyncio.create_task(worker.ready())
    await tls.until(lambda: "no certificate yet" in caplog.text, "the hub is away")
    assert not waiting.done()
    await tls.hub_up()
    await waiting
    assert worker.until > time.time()


async def test_a_lost_answer_costs_no_identity(tls):
    """The hub knows the node by its key, although no certificate has reached the state folder."""
    hub = await tls.hub_up()
    token = await token_for(hub, "worker", uses=1)
    made = node(tls, token)
    host, port = tls.address
    await enrol(host, port, token, made.who.node, "w", "worker", made._key)
    again = await working(tls, token)
    assert again.who == made.who


async def test_an_expired_certificate_is_requested_anew_with_the_same_key(tls):
    hub = await tls.hub_up(certificate_s=10.0)
    token = await token_for(hub, "worker")
    first = await working(tls, token)
    held = Credentials.load(tls.folder / "w" / FILE)
    expire(hub, token)
    await hub.state.admission.trust.save()
    await tls.down(hub)
    await tls.until(lambda: time.time() > held.until, "its certificate is over")
    await tls.hub_up()
    second = node(tls, None)
    await second.ready()
    assert second.who == first.who
    assert second.until > held.until
    assert key_print(Credentials.load(tls.folder / "w" / FILE).key.public_key()) == key_print(held.key.public_key())


async def test_a_renewed_certificate_is_shown_by_the_next_request(tls):
    """Although the pool still has the connection of the earlier certificate. The token has expired meanwhile."""
    hub = await tls.hub_up(certificate_s=20.0)
    token = await token_for(hub, "worker")
    worker = await working(tls, token)
    ledger = Ledger(await working(tls, await token_for(hub, "ledger"), "ledger", "l"))
    expire(hub, token)
    contexts = worker.tls.server, worker.tls.client
    async with ledger.serving() as url, aiohttp.ClientSession() as session, renewing(tls, worker) as until:
        assert await ask(session, url, worker) == "ok"
        first = worker.until
        await until(lambda: worker.until > first, "the certificate is renewed")
        assert await ask(session, url, worker) == "ok"
    assert ledger.shown[0] != ledger.shown[1] == worker.tls.credentials.certificate
    assert ledger.callers == [worker.who] * 2
    assert contexts == (worker.tls.server, worker.tls.client)
    assert node(tls, None).until == worker.until


async def test_a_hub_that_is_away_ends_no_worker(tls, caplog, monkeypatch):
    monkeypatch.setattr(node_certificate, "RETRY_MOST_S", 1.0)
    caplog.set_level(logging.DEBUG, "p2pcast.certificate")
    hub = await tls.hub_up(certificate_s=10.0)
    worker = await working(tls, await token_for(hub, "worker"))
    first = worker.until
    await tls.down(hub)
    async with renewing(tls, worker) as until:
        await until(lambda: caplog.text.count("no new certificate") > 2, "renewal fails")
        await until(lambda: "has expired" in caplog.text, "the certificate is over")
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "no new" in r.getMessage()]
        assert ["has expired" in text for text in warned] == [False, True]
        await tls.hub_up()
        await until(lambda: worker.until > first, "the certificate is renewed")


async def test_a_hub_that_refuses_ends_no_worker_with_a_valid_certificate(tls, caplog):
    hub = await tls.hub_up(certificate_s=15.0)
    worker = await working(tls, await token_for(hub, "worker"))
    await hub.state.admission.commands.evict({"peer": worker.who.node.hex()})
    async with renewing(tls, worker) as until:
        await until(lambda: "no new certificate" in caplog.text, "the hub refuses")
    assert "evicted" in caplog.text
    again = node(tls, None)
    await again.ready()
    assert again.until == worker.until


async def test_an_evicted_worker_without_a_certificate_ends(tls):
    hub = await tls.hub_up()
    token = await token_for(hub, "worker")
    worker = await working(tls, token)
    await hub.state.admission.commands.evict({"peer": worker.who.node.hex()})
    await asyncio.to_thread((tls.folder / "w" / FILE).unlink)
    with pytest.raises(RefusedError, match="evicted"):
        await working(tls, token)
