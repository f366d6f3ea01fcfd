"""Fixtures: a real S3 server (OpenStack Swift's), a proxy before it that fails as networks and stores do, and a run
that is already mirrored.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yarl
from aiohttp import web

PYTHON = "/usr/bin/python3"
SERVER = Path(__file__).with_name("swift_server.py")
KEYS = {"AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
BUCKET = "bucket"
HOP = {"connection", "keep-alive", "transfer-encoding"}


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real server."""
    if subprocess.run(
        [PYTHON, "-c", "import swift.proxy, swift.obj, swift.account, swift.container"], capture_output=True
    ).returncode:
        pytest.skip("needs a real S3 server: apt-get install swift-proxy swift-account swift-container swift-object")
    folder = tmp_path_factory.mktemp("swift")
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            [PYTHON, SERVER, folder], stdout=subprocess.PIPE, stderr=log, text=True, env={"PATH": os.environ["PATH"]}
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        yield int(line)
        process.kill()


class Network:
    """A proxy. ``faults``: kind → share of the requests; requests are counted by method and kind of object."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self.faults: dict[str, float] = {}
        self.most_bytes_s: float | None = None
        """Of what is written, and of what is read."""
        self.reads_left: int | None = None
        """So many slices are answered for, the others never."""
        self.failed: Counter[str] = Counter()
        self.puts: list[str] = []
        """Paths that were written, whole."""
        self.removed: list[str] = []
        self.reads: list[str] = []
        """Paths that were read, not listed."""
        self._server = f"http://127.0.0.1:{port}"
        self._chance = random.Random(1)
        self._lists: dict[str, tuple[dict[str, str], bytes]] = {}

    async def start(self) -> None:
        self._client = aiohttp.ClientSession(auto_decompress=False)
        self._runner = web.AppRunner(app := web.Application(client_max_size=1 << 30), handler_cancellation=True)
        app.router.add_route("*", "/{path:.*}", self._handle)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def bucket(self) -> None:
        """An account's own key for Swift makes the bucket, by Swift's own protocol."""
        auth = {"X-Auth-User": "test:tester", "X-Auth-Key": "testing"}
        async with self._client.get(f"{self._server}/auth/v1.0", headers=auth) as answer:
            url, token = answer.headers["X-Storage-Url"], answer.headers["X-Auth-Token"]
        async with self._client.put(f"{url}/{BUCKET}", headers={"X-Auth-Token": token}) as answer:
            assert answer.status < 300

    def _fault(self) -> str | None:
        draw = self._chance.random()
        for kind, share in self.faults.items():
            draw -= share
            if draw < 0:
                self.failed[kind] += 1
                return kind
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body, fault = await request.read(), self._fault()
        if self.most_bytes_s is not None:
            await asyncio.sleep(len(body) / self.most_bytes_s)
        if fault in ("500", "503"):
            code = {"500": "InternalError", "503": "SlowDown"}[fault]
            return web.Response(
                status=int(fault), text=f"<Error><Code>{code}</Code><Message>Please try again.</Message></Error>"
            )
        if fault == "reset" and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if request.method == "GET" and "/log/" in request.path and self.reads_left is not None:
            if not self.reads_left:
                await asyncio.Event().wait()
            self.reads_left -= 1
        if fault == "slow":
            await asyncio.sleep(0.3)
        url = yarl.URL(self._server + request.raw_path, encoded=True)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        async with self._client.request(
            request.method,
            url,
            headers=headers,
            data=io.BytesIO(body) if body else None,
            skip_auto_headers=["User-Agent", "Accept"],
        ) as answer:
            got, status = await answer.read(), answer.status
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
        if self.most_bytes_s is not None:
            await asyncio.sleep(len(got) / self.most_bytes_s)
        if request.method == "PUT" and status == 200:
            self.puts.append(request.path)
        if request.method == "DELETE" and status < 300:
            self.removed.append(request.path)
        if request.method == "GET" and "list-type" not in request.query:
            self.reads.append(request.path)
        if request.method == "GET" and "list-type" in request.query and status == 200:
            prefix = request.query.get("prefix", "")
            if fault == "stale" and prefix in self._lists:
                kept, got = self._lists[prefix]
            else:
                self._lists[prefix] = (kept, got)
        if (
            request.method == "GET" and fault == "corrupt" and len(got) > 40
        ):  # except the run's key, whose change would name another run
            got = got[:20] + bytes([got[20] ^ 1]) + got[21:]
        return await self._answer(request, status, kept, got, cut=fault == "cut" and request.method == "GET")

    async def _answer(
        self, request: web.Request, status: int, headers: dict[str, str], body: bytes, *, cut: bool
    ) -> web.StreamResponse:
        answer = web.StreamResponse(status=status, headers=headers)
        answer.content_length = int(headers.get("Content-Length", len(body))) if request.method == "HEAD" else len(body)
        await answer.prepare(request)
        if request.method != "HEAD":
            await answer.write(body[: len(body) // 2] if cut else body)
        if cut and request.transport is not None:
            request.transport.close()
        else:
            await answer.write_eof()
        return answer


@pytest.fixture
async def network(swift: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    network = Network(swift)
    await network.start()
    await network.bucket()
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.port}"}).items():
        monkeypatch.setenv(name, value)
    yield network
    await network.stop()


@pytest.fixture
def three_versions(swarm: Any, states: Any, url: str) -> Callable[[], Awaitable[Any]]:
    """``await three_versions()``: a hub with an anchor and two deltas, all on the mirror."""

    async def publish() -> Any:
        state = states.first()
        swarm.publish(0, state)
        hub = await swarm.hub_up(mirror=url)
        for step in (1, 2):
            await swarm.published(f"0.{step - 1}")
            swarm.publish(step, state := states.trained(state, step))
        await swarm.mirrored("0.2")
        return hub

    return publish
