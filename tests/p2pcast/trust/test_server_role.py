"""Clients of one role of server, on real sockets: another node of the run gets no byte of a request."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from p2pcast.ground.errors import UntrustedError
from p2pcast.process import event_loop
from p2pcast.transport.tls_errors import explain
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.server_role import WrongServerError, client_context
from p2pcast.trust.tls_contexts import Tls

WORKER, OTHER = b"w" * 16, b"o" * 16
LOOPS = pytest.mark.parametrize("loop", [event_loop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
BODY = b"results"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


class Server:
    """Keeps every byte that TLS delivers, and gives one answer."""

    def __init__(self) -> None:
        self.heard = b""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not self.heard.endswith(BODY) and (said := await reader.read(1 << 16)):
                self.heard += said
            if self.heard:
                writer.write(ANSWER)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(tls: Tls) -> AsyncIterator[Server]:
    found = Server()
    listener = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=tls.server)
    found.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield found


def run(play: Callable[[], object], loop: Callable[[], asyncio.AbstractEventLoop] = event_loop.new_event_loop) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(play())  # type: ignore[arg-type]


async def ask(server: Server, context: ssl.SSLContext) -> str:
    url = f"https://localhost:{server.port}/v1/workers"
    async with aiohttp.ClientSession() as session, session.post(url, data=BODY, ssl=context) as answer:
        return await answer.text()


async def refusal(server: Server, context: ssl.SSLContext) -> ssl.SSLCertVerificationError:
    with pytest.raises(aiohttp.ClientConnectorCertificateError) as found:
        await ask(server, context)
    assert server.heard == b""
    error = found.value.certificate_error
    assert isinstance(error, ssl.SSLCertVerificationError)
    return error


@LOOPS
def test_a_server_of_the_expected_role_is_answered(papers, loop):
    async def play() -> None:
        async with serving(papers.tls(OTHER, "ledger")) as server:
            assert await ask(server, client_context(papers.credentials(WORKER, "worker"), "ledger")) == "ok"
            assert server.heard.startswith(b"POST /v1/workers")

    run(play, loop)


@LOOPS
@pytest.mark.parametrize("role", ["peer", "hub"])
def test_a_server_of_another_role_receives_no_byte(papers, loop, role):
    async def play() -> None:
        async with serving(papers.tls(OTHER, role)) as server:
            error = await refusal(server, client_context(papers.credentials(WORKER, "worker"), "ledger"))
            assert isinstance(error, WrongServerError)
            line = str(explain(error, "here"))
            assert line == f"here: a {role} answers at this address, not a ledger of this run; check the address"

    run(play, loop)


@pytest.mark.parametrize("role", ["worker", "trainer"])
def test_a_clients_certificate_is_no_servers(papers, role):
    """TLS itself refuses the certificate: it is for clients only."""

    async def play() -> None:
        async with serving(papers.tls(OTHER, role)) as server:
            error = await refusal(server, client_context(papers.credentials(WORKER, "worker"), "ledger"))
            found = explain(error, "here")
            assert isinstance(found, UntrustedError)
            assert "is not a server's" in str(found)

    run(play)


def test_a_ledger_of_another_run_receives_no_byte(papers):
    """By the authority, and by the run in the name, should the authority ever sign for two runs."""
    others = type(papers)()
    key, who = new_key(), Certified(b"R" * 16, OTHER, "ledger")
    issued = papers.authority.issue(key.public_key(), who, time.time(), 900)
    renamed = Tls(Credentials(key, issued, papers.authority.certificate, time.time()))

    async def play() -> None:
        context = client_context(papers.credentials(WORKER, "worker"), "ledger")
        async with serving(others.tls(OTHER, "ledger")) as server:
            assert not isinstance(await refusal(server, context), WrongServerError)
        async with serving(renamed) as server:
            assert "another run" in (await refusal(server, context)).verify_message

    run(play)


def test_a_ledger_whose_certificate_has_expired_receives_no_byte(papers):
    async def play() -> None:
        old = papers.tls(OTHER, "ledger", at=time.time() - 3600, lifetime_s=60)
        async with serving(old) as server:
            error = await refusal(server, client_context(papers.credentials(WORKER, "worker"), "ledger"))
            assert "expired" in error.verify_message

    run(play)


def test_a_blocking_client_is_checked_too(papers):
    def post(port: int, context: ssl.SSLContext) -> int:
        connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=600)
        try:
            connection.request("POST", "/v1/workers", BODY)
            return connection.getresponse().status
        finally:
            connection.close()

    async def play() -> None:
        context = client_context(papers.credentials(WORKER, "worker"), "ledger")
        async with serving(papers.tls(OTHER, "peer")) as server:
            with pytest.raises(WrongServerError, match="a peer answers"):
                await asyncio.to_thread(post, server.port, context)
            assert server.heard == b""
        async with serving(papers.tls(OTHER, "ledger")) as server:
            assert await asyncio.to_thread(post, server.port, context) == 200

    run(play)
