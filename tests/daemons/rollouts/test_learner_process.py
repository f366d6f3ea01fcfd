"""``p2pcast learn`` with a real hub, ledger and worker as processes; killed by SIGKILL, it trains each batch once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from fake_engine import VOCABULARY, FakeEngine
from parity_task import NAME

from netem.rollouts.small_model import SmallModel, write_small_model
from trainer_node.learning.monitoring.run_log import read_run

ROOT = Path(__file__).parents[3]
STEPS, STALENESS, KILLED_AT = 8, 2, 4
END_S = 600.0
CONFIG = """
[model]
path = "{model}"
threads = 1
[hub]
address = "{hub}"
token-file = "{folder}/token"
[ledger]
url = "{ledger}"
bearer-file = "{folder}/ledger/http.token"
[train]
micro-batch-tokens = 512
[optimizer]
lr = 1e-3
[checkpoint]
folder = "{folder}/learner"
every = 3
[task]
name = "{task}"
[watch]
live-limit = 0.5
"""


class FollowingEngine(FakeEngine):
    """Serves the hub's newest version, by the hashes of the hub's manifests."""

    manifests: dict[str, str] = {}  # noqa: RUF012 - of one engine a test

    async def _versions(self, request: web.Request) -> web.Response:
        answer = json.loads((await super()._versions(request)).body)  # type: ignore[arg-type]
        return web.json_response(answer | {"manifests": self.manifests})

    async def follow(self, hub: str) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{hub}/versions") as answer:
                        self.manifests = (await answer.json())["manifests"]
                        self.versions = [max(self.manifests, key=_key)] if self.manifests else ["default"]
                await asyncio.sleep(0.05)


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class Processes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, *words: str) -> asyncio.subprocess.Process:
        with open(self._folder / f"{name}.log", "ab") as log:  # noqa: ASYNC230 - a local file
            self.running[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "p2pcast.cli", *words, cwd=ROOT, stdout=log, stderr=log
            )
        return self.running[name]

    async def daemon(self, name: str) -> dict[str, Any]:
        """Where the daemon listens, once it does."""
        file = self._folder / name / "daemon.json"
        return await self.until(lambda: json.loads(file.read_text()) if file.exists() else None)

    async def until(self, found: Callable[[], Any]) -> Any:
        async with asyncio.timeout(END_S):
            while not (value := found()):
                for name, process in self.running.items():
                    assert process.returncode is None, f"{name} ended: {self.said(name)}"
                await asyncio.sleep(0.05)
            return value

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-3000:]


@contextlib.asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Processes]:
    made = Processes(folder)
    try:
        yield made
    finally:
        for process in made.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for name in made.running:
            print(f"--- {name}\n{made.said(name)}")


async def test_learner_that_is_killed_trains_each_batch_once(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", SmallModel(VOCABULARY, hidden=64, layers=1), seed=1, dtype="bfloat16")
    engine = FollowingEngine()
    await engine.start()
    try:
        async with processes(tmp_path) as run:
            await _run(tmp_path, model, engine, run)
    finally:
        await engine.stop()


async def _run(folder: Path, model: Path, engine: FollowingEngine, run: Processes) -> None:
    here = ("--http", "127.0.0.1:0", "--state")
    await run.start(
        "hub", "seed", "--base", str(model), "--listen", "127.0.0.1:0", "--token-file", str(folder / "token"),
        *here, str(folder / "hub"), "--shadow", str(folder / "shadow"),
    )  # fmt: skip
    hub = (await run.daemon("hub"))["http"]
    address = await run.until(lambda: run.said("hub").partition("listening on ")[2].partition(",")[0])
    bounds = ["--staleness", str(STALENESS), "--batch-groups", "2", "--group-size", "4", "--last-step", str(STEPS)]
    await run.start(
        "ledger", "ledger", "--task", NAME, "--hub-http", hub.removeprefix("http://"), *bounds,
        *here, str(folder / "ledger"),
    )  # fmt: skip
    ledger = (await run.daemon("ledger"))["http"]
    file = folder / "run.toml"
    file.write_text(CONFIG.format(task=NAME, model=model, hub=address, ledger=ledger, folder=folder))
    following = asyncio.create_task(engine.follow(hub))
    await run.start("learner", "learn", str(file))
    place = ["--engine", engine.url, "--peer", engine.url.removeprefix("http://")]
    worker = ["--bearer-file", str(folder / "ledger" / "worker.token"), "--slots", "8"]
    await run.start("worker", "work", ledger.removeprefix("http://"), "--task", NAME, *place, *worker)

    log = folder / "learner" / "metrics.jsonl"
    await run.until(lambda: log.exists() and len(read_run(log).steps) >= KILLED_AT)
    run.running["learner"].send_signal(signal.SIGKILL)
    await run.running.pop("learner").wait()
    learner = await run.start("learner", "learn", str(file))
    async with asyncio.timeout(END_S):
        assert await learner.wait() == 0, run.said("learner")
        assert await run.running["worker"].wait() == 0, run.said("worker")
    following.cancel()

    record = read_run(log)
    assert [step.step for step in record.steps] == list(range(1, STEPS + 1))
    assert record.superseded_steps
    assert all(int(age) <= STALENESS for step in record.steps for age in step.staleness)
    assert record.probes
    # This engine has weights of its own, whatever version is installed.
    assert all(probe.alarm for probe in record.probes)
    assert "ALARM" in run.said("learner")
    assert len(record.starts) == 2
    assert record.starts[1].branch > record.starts[0].branch
    rows = sqlite3.connect(folder / "ledger" / "ledger.db").execute("select step, state from batches").fetchall()
    live = sorted(step for step, state in rows if state != "reopened")
    assert live == list(range(STEPS)), "each step of the lineage has one batch"
    assert {state for _, state in rows} <= {"trained", "reopened"}
    assert max(engine.manifests, key=_key).endswith(f".{STEPS}")
