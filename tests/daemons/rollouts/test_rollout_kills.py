"""Ledger, workers and learner, all real processes, are killed by SIGKILL: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kill_checks import check_ledger, check_lineage, plan
from parity_task import NAME

from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.version import Version
from tests.support.fake_engine import FakeEngine
from tests.support.until import check_runs, until

STALENESS, BATCH_GROUPS, GROUP_SIZE = 2, 2, 4
END_S = 600.0
KILL_S = 45.0
"""Time in seconds that each kill adds to the limit of the whole run."""
PARTS = ("ledger", "learner", "w0", "w1")
SCRIPT = Path(__file__).with_name("killable_learner.py")


class Run:
    """Ledger, two workers and the learner. ``steps``: of the learner. ``database``: URL; None: SQLite."""

    def __init__(self, folder: Path, engine: FakeEngine, steps: int, database: str | None) -> None:
        self.folder, self.state, self.database, self.steps = folder, folder / "ledger", database, steps
        self._engine = engine
        self._port = 0
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.killed: Counter[str] = Counter()
        (folder / "learner").mkdir()
        self.allow(1)

    # -- processes

    async def start(self, name: str) -> None:
        module = ["-m", "p2pcast.cli"]
        if name == "ledger":
            bounds = ["--staleness", str(STALENESS), "--batch-groups", str(BATCH_GROUPS)]
            words = [*module, "ledger", "--http", f"127.0.0.1:{self._port}", "--state", str(self.state), *bounds]
            words += ["--task", NAME, "--group-size", str(GROUP_SIZE), "--lease-guess", "3"]
            words += ["--last-step", str(self.steps)]
            words += [] if self.database is None else ["--database", self.database]
        elif name == "learner":
            words = [str(SCRIPT), str(self._learner_config())]
        else:
            engine = ["--engine", self._engine.url, "--peer", self._engine.url.removeprefix("http://")]
            bearer = ["--bearer-file", str(self.state / "worker.token")]
            words = [*module, "work", f"127.0.0.1:{self._port}", "--task", NAME, "--name", name, *bearer, *engine]
        with open(self.folder / f"{name}.log", "ab") as log:  # noqa: ASYNC230 - a local file
            self.running[name] = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=log, stderr=log)

    def _learner_config(self) -> Path:
        file = self.folder / "learner.json"
        url, bearer = f"http://127.0.0.1:{self._port}", str(self.state / "http.token")
        about = {"folder": str(self.folder / "learner"), "steps": self.steps, "staleness": STALENESS}
        file.write_text(json.dumps(about | {"url": url, "bearer": bearer, "model": None, "hub": None}))
        return file

    async def begin(self) -> None:
        await self.start("ledger")
        await until((self.state / "daemon.json").exists, check=lambda: check_runs(self.running["ledger"]))
        url = json.loads((self.state / "daemon.json").read_text())["http"]
        self._port = int(url.rpartition(":")[2])
        for name in PARTS[1:]:
            await self.start(name)

    async def kill(self, name: str, boundary: str | None) -> None:
        """At the learner's boundary, or now. Starts the part again."""
        die_at = self.folder / "learner" / "die-at"
        if boundary in (None, "resumed"):
            await self._killed(name)
        if boundary is not None:
            atomic_write(die_at, boundary.encode())
            if boundary == "resumed":
                await self.start(name)
            self.allow(3)  # a checkpoint is written at every second step
            await self._killed(name, by_itself=True)
        self.killed[name if boundary is None else f"{name} {boundary}"] += 1
        await self.start(name)

    async def _killed(self, name: str, *, by_itself: bool = False) -> None:
        process = self.running[name]
        if not by_itself:
            assert process.returncode is None, f"{name} ended by itself"
            process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(END_S):
            assert await process.wait() == -signal.SIGKILL

    async def end(self) -> None:
        """Each part ends by itself once the run has ended; the ledger is asked to."""
        for name in ("learner", "w0", "w1", "ledger"):
            if name == "ledger":
                self.running[name].terminate()
            assert await self.running[name].wait() == 0, name

    async def stop(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for file in sorted(self.folder.glob("*.log")):
            print(f"--- {file.name}\n{file.read_text()[-6000:]}")

    # -- the learner's progress

    def allow(self, more: int) -> None:
        """Steps beyond the newest one: the run does not end before the last kill."""
        atomic_write(self.folder / "learner" / "allowed", str(self.step() + more).encode())

    def _applied(self) -> list[str]:
        file = self.folder / "learner" / "applied"
        return file.read_text().split() if file.exists() else []

    def step(self) -> int:
        return max((Version.parse(line).step for line in self._applied()[-1:]), default=0)

    def applied(self) -> int:
        """Steps that learners have applied, the lost ones included."""
        return len(self._applied())

    async def until_applied(self, count: int) -> None:
        def check() -> None:
            for process in self.running.values():
                check_runs(process)

        await until(self.applied, holds=lambda applied: applied >= count, check=check)


@asynccontextmanager
async def started(folder: Path, engine: FakeEngine, steps: int, database: str | None) -> AsyncIterator[Run]:
    run = Run(folder, engine, steps, database)
    announcements = asyncio.create_task(announce(folder / "learner" / "announced", engine))
    try:
        await run.begin()
        yield run
    finally:
        announcements.cancel()
        await asyncio.wait([announcements])
        await run.stop()


async def announce(folder: Path, engine: FakeEngine) -> None:
    """The engine goes through the versions that the learner has announced, one more with each token."""
    engine.tokens_a_version = 1
    while True:
        with contextlib.suppress(FileNotFoundError):
            engine.versions = [str(version) for version in sorted(map(Version.parse, os.listdir(folder)))]
        await asyncio.sleep(0.02)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "count"), [(1, 4), pytest.param(2, 24, marks=pytest.mark.prove)])
async def test_nothing_is_lost_though_parts_are_killed(
    tmp_path: Path, engine: FakeEngine, database: str | None, seed: int, count: int
) -> None:
    engine.versions = []
    steps, drawn = 5 * count + 4, random.Random(seed)
    async with (
        asyncio.timeout(END_S + 2 * KILL_S * count),
        started(tmp_path, engine, steps, database) as run,
    ):
        for victim, boundary in plan(PARTS, count, seed):
            run.allow(2)
            await run.until_applied(run.applied() + 1)
            if boundary is None:
                await asyncio.sleep(drawn.uniform(0.0, 0.5))
            await run.kill(victim, boundary)
        run.allow(steps)  # to the end
        await run.end()
        assert run.killed.total() == count
    found = check_lineage(tmp_path / "learner", steps, STALENESS)
    rows = check_ledger(run.state, database, found, STALENESS)
    states = {name: dict(Counter(row.state for row in rows[name])) for name in ("jobs", "leases", "batches")}
    print(f"killed {dict(run.killed)}; {run.applied()} steps applied for {steps}; rows {states}")
