"""Cost of the run's page: the hub's CPU without and with viewers, the bytes of a load, and the time to the first paint.

The hub is a real one, in a process of its own, with the records of peers that only report progress. They have no links,
so that the CPU is that of the page. A load is measured with a real Chromium, if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from netem.broadcast.cpu import process_s
from netem.fleet.processes import free_port
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.process import event_loop
from p2pcast.wire.lenient_report import Progress
from trainer_node.hub import Hub, opened
from trainer_node.hub_config import HubConfig
from trainer_node.membership.engine_reports import engine_rows
from trainer_node.membership.peer_record import NO_REPORT, PeerRecord

REGIONS = 8
MOVING = 0.2
"""Share of the peers whose rows change within a second."""
DEADLINE_S = 120.0
SETTLE_S = 3.0


def bench_page(peers: int, viewers: int, seconds: float, chromium: str | None) -> dict[str, Any]:
    """``idle_share`` and ``viewed_share``: of one core, without and with viewers. ``loads``: of Chromium."""
    return event_loop.run(_bench(peers, viewers, seconds, chromium))


async def _bench(peers: int, viewers: int, seconds: float, chromium: str | None) -> dict[str, Any]:
    async with _hub(peers) as (pid, url), aiohttp.ClientSession() as http:
        await asyncio.sleep(SETTLE_S)
        idle = await _share(pid, seconds)
        reading = [asyncio.create_task(_view(http, url)) for _ in range(viewers)]
        await asyncio.sleep(SETTLE_S)
        viewed = await _share(pid, seconds)
        for task in reading:
            task.cancel()
        received = await asyncio.gather(*reading, return_exceptions=True)
        async with http.get(url + "/page/picture") as answer:
            picture_bytes = int(answer.headers["Content-Length"])
        loads = None if chromium is None else await asyncio.to_thread(_load, url, chromium)
    failed = [error for error in received if not isinstance(error, asyncio.CancelledError)]
    if failed:
        raise RetryableError(f"a viewer ended: {failed[0]}")
    return {
        "peers": peers,
        "viewers": viewers,
        "idle_share": round(idle, 4),
        "viewed_share": round(viewed, 4),
        "picture_bytes": picture_bytes,
        "chromium": loads,
    }


@contextlib.asynccontextmanager
async def _hub(peers: int) -> AsyncIterator[tuple[int, str]]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder:
        command = [sys.executable, "-P", "-m", "netem.bench.page_cost", folder, str(port), str(peers)]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + DEADLINE_S
        try:
            async with aiohttp.ClientSession() as http:
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(url + "/healthz") as answer:
                            if answer.status == 200:
                                break
                    if process.returncode is not None or time.monotonic() > until_s:
                        raise RetryableError("the hub did not start")
                    await asyncio.sleep(0.1)
            yield process.pid, url
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _share(pid: int, seconds: float) -> float:
    """CPU time of the process, as a share of one core."""
    before_s, began_s = process_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (process_s(pid) - before_s) / (time.monotonic() - began_s)


async def _view(http: aiohttp.ClientSession, url: str) -> None:
    """As the page does. Until cancelled."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with http.get(url + "/page/picture") as answer:
        number = (await answer.json())["number"]
    async with http.get(f"{url}/page/changes?after={number}", timeout=timeout) as answer:
        async for _ in answer.content.iter_any():
            pass
    raise RetryableError("the hub ended the stream")


def _load(url: str, chromium: str) -> dict[str, float]:
    """A first visit, and a second with what the browser has kept."""
    from playwright.sync_api import sync_playwright

    found: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context().new_page()
        for visit in ("first", "second"):
            page.goto(url)
            page.wait_for_selector("#peers tbody tr", state="attached")
            found[f"{visit}_paint_s"] = page.evaluate(PAINT) / 1e3
            found[f"{visit}_bytes"] = page.evaluate(BYTES)
        browser.close()
    return found


PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
BYTES = """
["resource", "navigation"].flatMap((kind) => performance.getEntriesByType(kind))
  .filter((one) => !one.name.includes("/page/changes")).reduce((sum, one) => sum + one.transferSize, 0)
"""


async def _serve(folder: Path, port: int, peers: int) -> None:
    config = HubConfig(state=folder / "hub", shadow=folder / "shadow", http=("127.0.0.1", port), plaintext=True)
    config = replace(config, listen=("127.0.0.1", 0), token_file=folder / "token")
    async with opened(config) as hub:
        _populate(hub, peers)
        async with asyncio.TaskGroup() as group:
            group.create_task(hub.run(), name="hub")
            group.create_task(_move(hub), name="reports")


def _populate(hub: Hub, peers: int) -> None:
    members, now = hub.fleet.membership, time.monotonic()
    for number in range(peers):
        version = Version(0, 7)
        row: Any = {"name": "vllm:http://127.0.0.1:8000", "started": True, "ready": True, "staged": str(version)}
        record = PeerRecord(f"{number:032x}", f"peer{number:04}", f"region{number % REGIONS}", "10.0.0.1", 7077, now)
        record.staged = record.committed = version
        record.engines = engine_rows([row | {"committed": str(version), "pause_s": 0.01}])
        record.report = NO_REPORT
        members.join(record, now)


async def _move(hub: Hub) -> None:
    """Reports of a share of the peers, each second."""
    draw, members = random.Random(1), hub.fleet.membership
    while True:
        for record in draw.sample(list(members.peers.values()), round(MOVING * len(members.peers))):
            received = draw.randrange(1 << 40)
            progress: Progress = {"version": "0.8", "pieces": draw.randrange(100), "of": 100}
            record.report = replace(record.report, bytes_received=received, progress=progress)
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    event_loop.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
