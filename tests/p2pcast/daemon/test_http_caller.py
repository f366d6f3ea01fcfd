"""Callers of an HTTPS server, known by their certificates."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from p2pcast.daemon import http_caller
from p2pcast.daemon.http_caller import certified_caller
from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.trust.server_role import client_context
from p2pcast.trust.tls_contexts import first_contact

WORKER, OTHER, LEDGER = b"w" * 16, b"o" * 16, b"l" * 16


class Server:
    """Answers with the caller; ``connections``: those of the requests, in order."""

    def __init__(self, run: bytes) -> None:
        self.run = run
        self.evicted: set[bytes] = set()
        self.connections: list[object] = []
        self.runner: web.AppRunner
        self.url = ""

    async def start(self, tls: ssl.SSLContext | None) -> None:
        app = web.Application()
        app.router.add_get("/", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=tls).start()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://localhost:{self.runner.addresses[0][1]}/"

    async def _answer(self, request: web.Request) -> web.Response:
        self.connections.append(request.transport)
        try:
            found = certified_caller(request, self.run, self.evicted)
        except RefusedError as error:
            return web.Response(status=403, text=str(error))
        except RetryableError as error:
            return web.Response(status=503, text=str(error))
        return web.Response(text="none" if found is None else f"{found.role} {found.node.decode()}")


@pytest.fixture
async def server(papers) -> AsyncIterator[Server]:
    found = Server(papers.run)
    yield found
    await found.runner.cleanup()


async def ask(server: Server, session: aiohttp.ClientSession, context: ssl.SSLContext | bool) -> tuple[int, str]:
    async with session.get(server.url, ssl=context) as answer:
        return answer.status, await answer.text()


async def test_a_caller_is_the_holder_of_its_certificate(papers, server):
    await server.start(papers.tls(LEDGER, "ledger").server)
    async with aiohttp.ClientSession() as session:
        for node, role in ((WORKER, "worker"), (OTHER, "trainer")):
            context = client_context(papers.credentials(node, role), "ledger")
            assert await ask(server, session, context) == (200, f"{role} {node.decode()}")


async def test_a_caller_over_plain_http_has_no_certificate(server):
    await server.start(None)
    async with aiohttp.ClientSession() as session:
        assert await ask(server, session, True) == (200, "none")


async def test_a_client_without_a_certificate_sends_no_request(papers, server):
    await server.start(papers.tls(LEDGER, "ledger").server)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await ask(server, session, first_contact())
    assert server.connections == []


async def test_an_expired_certificate_sends_no_request(papers, server):
    await server.start(papers.tls(LEDGER, "ledger").server)
    old = papers.credentials(WORKER, "worker", at=time.time() - 3600, lifetime_s=60)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await ask(server, session, client_context(old, "ledger"))
    assert server.connections == []


async def test_a_certificate_of_another_authority_sends_no_request(papers, server):
    await server.start(papers.tls(LEDGER, "ledger").server)
    mixed = papers.tls(WORKER, "worker")
    mixed.use(type(papers)().credentials(WORKER, "worker"))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await ask(server, session, mixed.client)
    assert server.connections == []


async def test_a_caller_of_another_run_is_refused(papers, server):
    server.run = b"R" * 16
    await server.start(papers.tls(LEDGER, "ledger").server)
    async with aiohttp.ClientSession() as session:
        status, text = await ask(server, session, client_context(papers.credentials(WORKER, "worker"), "ledger"))
    assert (status, "another run" in text) == (403, True)


async def test_an_eviction_counts_on_open_connections(papers, server):
    await server.start(papers.tls(LEDGER, "ledger").server)
    context = client_context(papers.credentials(WORKER, "worker"), "ledger")
    async with aiohttp.ClientSession() as session:
        assert (await ask(server, session, context))[0] == 200
        server.evicted.add(WORKER)
        status, text = await ask(server, session, context)
        assert (status, "evicted" in text) == (403, True)
    assert server.connections[0] is server.connections[1]


async def test_a_certificate_that_expires_on_an_open_connection_ends_the_connection(papers, server, monkeypatch):
    await server.start(papers.tls(LEDGER, "ledger").server)
    first = client_context(papers.credentials(WORKER, "worker", lifetime_s=600), "ledger")
    renewed = papers.credentials(WORKER, "worker", lifetime_s=7200)
    async with aiohttp.ClientSession() as session:
        assert (await ask(server, session, first))[0] == 200
        monkeypatch.setattr(http_caller, "time", SimpleNamespace(time=lambda: time.time() + 3600))
        status, text = await ask(server, session, first)
        assert (status, "has expired" in text) == (503, True)
        assert server.connections[0] is server.connections[1]
        assert (await ask(server, session, first))[0] == 503
        assert server.connections[2] is not server.connections[1]
        assert (await ask(server, session, client_context(renewed, "ledger")))[0] == 200
