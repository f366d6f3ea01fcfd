"""A star that sends every version whole: the rival of `lab rl-run`, for the weights alone.

    main: serve PORT HUB_URL EXPORTS
    main: fetch SERVER_URL ENGINE_URL HTTP_PORT FOLDER BASE

``serve`` runs beside the learner, which writes each version as a checkpoint (``[export] every = 1``), and serves the
newest one over HTTP. ``fetch`` runs beside each engine: it fetches the newest checkpoint, again and again, and installs
it into the engine. Connections stay open; a version that is superseded while another one is fetched is left out.

To the ledger and to workers the run looks like any other. The hub, which has no peers, names the versions and the
hashes of their manifests; ``fetch`` serves ``/versions`` as a peer does. There is no TLS on the way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web

from p2pcast.ground.version import Version

PORT: Final = 7099
LOOK_S: Final = 0.1
"""Interval at which the server looks for a new version."""
HOLD_S: Final = 5.0
"""Longest wait of a request for a new version; the answer is then empty."""
SILENT_S: Final = 10.0
"""Time without a byte after which a fetch begins anew."""
NODE: Final = "00" * 16
ENGINE: Final = "star"
WEIGHTS: Final = "model.safetensors"
INSTALLED: Final = "installed.jsonl"
"""Below FOLDER: ``{version, time, bytes}`` of each installation."""

log = logging.getLogger("p2pcast.bench")


# -- beside the learner


class StarServer:
    def __init__(self, http: aiohttp.ClientSession, hub_url: str, exports: Path) -> None:
        self._http, self._url, self._exports = http, f"{hub_url}/versions", exports

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/newest", self._newest)]

    async def _newest(self, request: web.Request) -> web.StreamResponse:
        """The newest version, once it is another than ``?served=``. Step 0 is the base, which needs no bytes."""
        served, until_s = request.query["served"], time.monotonic() + HOLD_S
        while (found := await self._found()) is None or str(found[0]) == served:
            if time.monotonic() > until_s:
                return web.Response(status=204)
            await asyncio.sleep(LOOK_S)
        version, manifest, path = found
        head = {"X-Version": str(version), "X-Manifest": manifest}
        return web.Response(headers=head) if path is None else web.FileResponse(path, headers=head)

    async def _found(self) -> tuple[Version, str, Path | None] | None:
        """The newest version that the hub lists and the learner has written."""
        async with self._http.get(self._url) as answer:
            manifests = {Version.parse(text): digest for text, digest in (await answer.json())["manifests"].items()}
        written = {int(path.name.partition("-")[2]): path / WEIGHTS for path in self._exports.glob("??????-*")}
        for version in sorted(manifests, reverse=True):
            if not version.step or version.step in written:
                return version, manifests[version], written.get(version.step)
        return None


async def serve(port: int, hub_url: str, exports: Path) -> None:
    async with aiohttp.ClientSession() as http:
        await _until_signal(StarServer(http, hub_url, exports).routes(), "0.0.0.0", port)


# -- beside an engine


class StarFetcher:
    """``folder``: for the newest checkpoint. ``base``: the checkpoint of step 0."""

    def __init__(self, http: aiohttp.ClientSession, server: str, engine: str, folder: Path, base: Path) -> None:
        self._http, self._server, self._engine = http, server, engine
        self._folder, self._base = folder, base
        self._served: Version | None = None
        self._manifests: dict[str, str] = {}

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/versions", self._versions)]

    async def _versions(self, request: web.Request) -> web.Response:
        engines = {} if self._served is None else {ENGINE: str(self._served)}
        said: dict[str, Any] = {"run": "", "node": NODE, "kv": "recompute", "staged": None}
        return web.json_response({**said, "engines": engines, "manifests": self._manifests})

    async def run(self) -> None:
        """Fetch and install, without end."""
        while True:
            try:
                await self._next()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("%s: a fetch begins anew (%s)", self._server, type(error).__name__)
                await asyncio.sleep(LOOK_S)

    async def _next(self) -> None:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
        async with self._http.get(
            f"{self._server}/newest", params={"served": str(self._served)}, timeout=limit
        ) as answer:
            answer.raise_for_status()
            if answer.status == 204:
                return
            version, manifest = Version.parse(answer.headers["X-Version"]), answer.headers["X-Manifest"]
            size, source = 0, self._base
            if version.step:
                source, size = self._folder, await self._received(answer)
        self._manifests[str(version)] = manifest
        query = {"version": str(version), "folder": str(source)}
        async with self._http.post(f"{self._engine}/install", params=query) as done:
            done.raise_for_status()
        self._served = version
        with (self._folder / INSTALLED).open("a") as file:
            file.write(json.dumps({"version": str(version), "time": time.time(), "bytes": size}) + "\n")

    async def _received(self, answer: aiohttp.ClientResponse) -> int:
        part, size = self._folder / "part", 0
        with part.open("wb") as file:
            async for read in answer.content.iter_any():
                file.write(read)
                size += len(read)
        part.rename(self._folder / WEIGHTS)
        return size


async def fetch(server: str, engine: str, port: int, folder: Path, base: Path) -> None:
    async with aiohttp.ClientSession() as http:
        fetcher = StarFetcher(http, server, engine, folder, base)
        running = asyncio.create_task(fetcher.run(), name="fetching")
        await _until_signal(fetcher.routes(), "127.0.0.1", port)
        running.cancel()


async def _until_signal(routes: list[web.RouteDef], host: str, port: int) -> None:
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await runner.cleanup()


def main() -> None:
    role, *words = sys.argv[1:]
    if role == "serve":
        port, hub_url, exports = words
        asyncio.run(serve(int(port), hub_url, Path(exports)))
    else:
        server, engine, http_port, folder, base = words
        Path(folder).mkdir(parents=True)
        asyncio.run(fetch(server, engine, int(http_port), Path(folder), Path(base)))
