"""A replacement machine joins the swarm, and leases jobs only once its engine serves weights that were verified."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from ledger_stage import Up, config_of
from parity_task import NAME

from p2pcast.ground.version import Version
from tests.daemons.conftest import Swarm, first_state
from tests.support.fake_engine import FakeEngine
from tests.support.until import until
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon

ROOT = Path(__file__).parents[3]
END_S = 600.0


class Held:
    """Defers the engine's switch while ``held``."""

    held = True

    def before_commit(self, version: str) -> float:
        return 0.05 if self.held else 0.0


@contextlib.asynccontextmanager
async def working(
    daemon: LedgerDaemon, folder: Path, engine: FakeEngine, peer: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    host, port = peer.http.address
    where = ("--engine", engine.url, "--peer", f"{host}:{port}", "--task", NAME, "--name", "replacement")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pcast.cli", "-v", "work", f"127.0.0.1:{daemon.http.address[1]}", *where),
        *("--bearer-file", str(folder / WORKER_FILE), "--slots", "4"),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_replacement_gets_no_lease_before_its_weights_are_verified(
    swarm: Swarm, up: Up, engine: FakeEngine
) -> None:
    engine.versions = ["0.0"]
    hub, folder, hold = await swarm.hub_up(), swarm.folder / "ledger", Held()
    swarm.publish(0, first_state())
    await swarm.peer_up("first")
    await swarm.live("0.0")
    config = config_of(folder, hub=f"http://127.0.0.1:{hub.http.address[1]}")
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        url, sent = f"http://127.0.0.1:{daemon.http.address[1]}", (folder / "http.token").read_text().strip()
        head = {"Authorization": f"Bearer {sent}"}
        async with http.post(f"{url}/v1/learner/resume", json={"branch": 0, "step": 0, "batches": []}, headers=head):
            pass

        async def status() -> dict[str, Any]:
            await daemon.view.renew()
            async with http.get(f"{url}/status") as answer:
                found: dict[str, Any] = await answer.json()
                return found

        await until(status, holds=lambda seen: seen["versions"] == 1)
        peer = await swarm.peer_up("second", callbacks=hold, max_defer_s=600.0)
        await swarm.until(lambda: peer.staged == Version(0, 0), "the replacement has all bytes")
        async with working(daemon, folder, engine, peer) as process:
            assert process.stderr is not None
            looks = 0
            while looks < 2:
                line = (await process.stderr.readline()).decode()
                assert line, "the worker ended"
                assert "registered at the ledger" not in line, "a lease could follow"
                looks += "has no version yet" in line
            seen = await status()
            assert (seen["workers"], seen["leases"], engine.asked) == ([], {}, [])
            assert peer.committed is None
            hold.held = False
            drains = asyncio.create_task(process.stderr.read())  # a full pipe would stop the worker
            await until(status, holds=lambda seen: seen["results"].get("accepted", 0) >= 8)
            assert peer.committed == Version(0, 0)
            swarm.check(peer, 0)
            process.terminate()
            assert await process.wait() == 0
            await drains
