"""A server of one application, in a flood of connections."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web

from p2pcast.daemon import http_connections
from p2pcast.daemon.application_server import serving
from p2pcast.daemon.http_connections import HttpLimits
from p2pcast.daemon.request_body import read_json
from p2pcast.ground.errors import LocalError

DEADLINE_S = 600.0


async def test_a_flood_leaves_long_requests_and_new_callers(monkeypatch, caplog):
    monkeypatch.setattr(http_connections, "MIN_HTTP_CONNECTIONS", 1)
    began, ends = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        began.set()
        await ends.wait()
        return web.Response(text="waited")

    async def read(request: web.Request) -> web.Response:
        return web.json_response(await read_json(request, 100, 1e6))

    app = web.Application()
    app.add_routes([web.get("/wait", wait), web.post("/read", read)])
    async with serving(app, ("127.0.0.1", 0), 1.0, HttpLimits(most=8)) as address, aiohttp.ClientSession() as http:
        url = "http://{}:{}".format(*address)
        waiting = asyncio.create_task(http.get(f"{url}/wait"))
        async with asyncio.timeout(DEADLINE_S):
            await began.wait()
            held = []
            for _ in range(30):
                held.append(await asyncio.open_connection(*address))
                held[-1][1].write(b"POST /read HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n{")
            for reader, _ in held[8:20]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            async with http.post(f"{url}/read", json=[1]) as answer:
                assert await answer.json() == [1]
            ends.set()
            assert await (await waiting).text() == "waited"
        for _, writer in held:
            writer.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_an_address_in_use_is_named():
    async with serving(web.Application(), ("127.0.0.1", 0), 1.0) as address:
        with pytest.raises(LocalError, match=f"127.0.0.1:{address[1]}"):
            async with serving(web.Application(), address, 1.0):
                pass
