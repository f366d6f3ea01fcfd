"""The dense star: every engine gets the newest checkpoint whole, and a version that was superseded is left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from netem.rl_lab.dense_star import INSTALLED, WEIGHTS, StarFetcher, StarServer
from p2pcast.ground.version import Version
from rollout_node.worker.engine_versions import EngineVersions

END_S = 600.0
MANIFESTS = {"0.0": "00" * 32, "1.0": "10" * 32, "1.1": "11" * 32, "1.2": "12" * 32}


@asynccontextmanager
async def serving(*routes: web.RouteDef) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Learner:
    """The hub's list of versions, the learner's exports, and an engine that reads what it installs."""

    def __init__(self, folder: Path) -> None:
        self.exports, self.base = folder / "exports", folder / "base"
        self.listed = ["0.0"]
        self.installed: list[tuple[str, bytes]] = []
        self.exports.mkdir()
        self.base.mkdir()
        (self.base / WEIGHTS).write_bytes(b"base")

    def write(self, step: int) -> None:
        folder = self.exports / f"000001-{step:09d}"
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(b"weights of %d" % step)

    async def versions(self, request: web.Request) -> web.Response:
        return web.json_response({"manifests": {version: MANIFESTS[version] for version in self.listed}})

    async def install(self, request: web.Request) -> web.Response:
        words = (Path(request.query["folder"]) / WEIGHTS).read_bytes()
        self.installed.append((request.query["version"], words))
        return web.Response()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(END_S):
            while not done():  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.01)


async def test_engines_follow_the_newest_whole_version(tmp_path: Path) -> None:
    learner = Learner(tmp_path)
    async with (
        aiohttp.ClientSession() as http,
        serving(web.get("/versions", learner.versions), web.post("/install", learner.install)) as hub,
        serving(*StarServer(http, hub, learner.exports).routes()) as server,
    ):
        fetcher = StarFetcher(http, server, hub, tmp_path, learner.base)
        async with serving(*fetcher.routes()) as peer:
            running = asyncio.create_task(fetcher.run())
            versions = EngineVersions(http, peer, "http://engine")
            await learner.until(lambda: learner.installed == [("0.0", b"base")])
            learner.listed.append("1.0")
            await learner.until(lambda: learner.installed[-1] == ("1.0", b"base"))
            learner.write(1)  # not listed yet
            learner.listed += ["1.1", "1.2"]
            learner.write(2)
            await learner.until(lambda: learner.installed[-1] == ("1.2", b"weights of 2"))
            served = await versions.refresh()
            assert (served.version, served.manifest.hex()) == (Version(1, 2), MANIFESTS["1.2"])
            running.cancel()
    lines = [json.loads(line) for line in (tmp_path / INSTALLED).read_text().splitlines()]
    assert [(one["version"], one["bytes"]) for one in lines][:2] == [("0.0", 0), ("1.0", 0)]
    assert (lines[-1]["version"], lines[-1]["bytes"]) == ("1.2", len(b"weights of 2"))
