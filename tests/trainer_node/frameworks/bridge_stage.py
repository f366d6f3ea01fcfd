"""A real ledger in this process, and a worker that hands in two tokens for each job: for adapters of other trainers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.environments import ROOT, python_of

DAEMONS = ROOT / "tests" / "daemons" / "rollouts"
sys.path += [str(DAEMONS), str(ROOT / "tests" / "rollout_node" / "vllm")]

from ledger_stage import config_of, running  # noqa: E402
from test_ledger_daemon import client_of  # noqa: E402
from test_ledger_requests import MANIFEST, ZERO, Stage, played  # noqa: E402

from p2pcast.ground.version import Version  # noqa: E402
from p2pcast.ledger_api.batch_client import BatchClient  # noqa: E402
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump  # noqa: E402
from trainer_node.ledger.database.ledger_store import LedgerStore  # noqa: E402
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon  # noqa: E402

GROUPS, SIZE = 2, 4
"""Groups of a batch, and samples of a group."""
STALENESS = 8
"""Versions other than the first are not served here."""
END_S = 240.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """``url``, ``bearer``: for trainers."""

    folder: Path
    url: str
    client: BatchClient
    daemon: LedgerDaemon
    worker: asyncio.Task[None]

    @property
    def bearer(self) -> Path:
        return self.folder / "http.token"

    async def idle(self) -> None:
        """The worker plays no more."""
        self.worker.cancel()
        await asyncio.wait([self.worker])

    async def stop(self) -> None:
        """The ledger answers no more."""
        await self.idle()
        await self.daemon.http.stop()

    async def publish(self, version: Version = ZERO) -> None:
        await asyncio.to_thread(self.client.publish, version, MANIFEST)


@contextlib.asynccontextmanager
async def filled_ledger(folder: Path, *, served: Version = ZERO, **more: Any) -> AsyncIterator[Ledger]:
    """``served``: the version of all results; the trainer publishes it. ``more``: of ``config_of``."""
    options: dict[str, Any] = {"staleness": STALENESS, "batch_groups": GROUPS} | more
    async with (
        asyncio.timeout(END_S),
        running(config_of(folder, **options)) as daemon,
        aiohttp.ClientSession() as http,
        asyncio.TaskGroup() as tasks,
    ):
        worker = tasks.create_task(_work(daemon, folder, http, served), name="played worker")
        url = f"http://127.0.0.1:{daemon.http.address[1]}"
        yield Ledger(folder, url, client_of(daemon, folder), daemon, worker)
        worker.cancel()


@contextlib.asynccontextmanager
async def played_hub(*versions: str) -> AsyncIterator[str]:
    """URL of a hub that names these versions."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"manifests": dict.fromkeys(versions, "")})

    app = web.Application()
    app.router.add_get("/versions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def _work(daemon: LedgerDaemon, folder: Path, http: aiohttp.ClientSession, served: Version) -> None:
    stage = Stage(daemon, folder, http)
    session = await stage.register("w")
    while True:
        leases = await stage.lease(session, 4, served=str(served), wait_s=0.2)
        results = [await played(lease, job, odd=bool(job.index % 2), version=served) for lease, job in leases]
        if results:
            await stage.hand_in(session, *results)


def batch_states(folder: Path) -> list[tuple[int, str]]:
    """Step and state of each batch, in the order of cutting. The ledger has ended."""
    store = LedgerStore(folder)
    try:
        rows = dump(store)
        check_rows(rows)
        return sorted((int(row.step), str(row.state)) for row in rows["batches"])
    finally:
        store.close()


async def run_in(environment: str, program: Path, *words: Any) -> str:
    """The program's output, run by the interpreter of a framework's environment."""
    python = await asyncio.to_thread(python_of, environment)
    process = await asyncio.create_subprocess_exec(
        python, program, *map(str, words),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, failed = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, failed.decode()[-3000:]
    return said.decode()
