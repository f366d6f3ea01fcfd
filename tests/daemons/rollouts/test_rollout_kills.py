"""Ledger, workers and learner are killed at any time: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_engine import FakeEngine, digest_of
from parity_task import NAME

from p2pcast.version import Version
from trainer_node.sdk.batch_client import BatchClient, RolloutBatch

STALENESS, BATCH_GROUPS = 2, 2
END_S = 300.0


class KilledError(Exception):
    """The learner died here."""


@dataclass
class Learner:
    """Trains in a thread, checkpoints every second step, and resumes under a new branch when it has died."""

    client: BatchClient
    engine: FakeEngine
    steps: int
    kill: threading.Event = field(default_factory=threading.Event)
    branch: int = 0
    saved: tuple[int, tuple[RolloutBatch, ...]] = (0, ())
    """The newest checkpoint: its step, and the batches of its lineage."""
    acked: set[bytes] = field(default_factory=set)
    deaths: int = 0

    def run(self) -> None:
        while self.saved[0] < self.steps:
            try:
                self._live()
            except KilledError:
                self.deaths += 1
                self.branch += 1

    def _die(self) -> None:
        if self.kill.is_set():
            self.kill.clear()
            raise KilledError

    def _publish(self, step: int) -> None:
        name = f"{self.branch}.{step}"
        self.client.publish(Version(self.branch, step), bytes.fromhex(digest_of(name)))
        self.engine.versions = [*self.engine.versions, name]
        self.engine.tokens_a_version = 1

    def _live(self) -> None:
        step, batches = self.saved
        since = [batch.id for batch in batches if batch.id not in self.acked]
        self.client.resume(self.branch, step, bytes([step] * 32), since)
        self._publish(step)
        while (batch := self.client.take(step)) is not None:
            self._die()
            assert batch.step == step
            step, batches = step + 1, (*batches, batch)
            self.client.applied(batch, step)
            self._die()
            self._publish(step)
            self._die()
            if step % 2 == 0 or step == self.steps:
                self.saved = (step, batches)
                self._die()
                since = [one.id for one in batches if one.id not in self.acked]
                self.client.ack(step, since, bytes([step] * 32))
                self.acked |= {*since}


class Processes:
    """The ledger and its workers."""

    def __init__(self, folder: Path, engine: FakeEngine, steps: int) -> None:
        self._folder, self._engine, self._steps = folder, engine, steps
        self.port = 0
        self.running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str) -> None:
        state = self._folder / "ledger"
        if name == "ledger":
            bounds = ["--staleness", str(STALENESS), "--batch-groups", str(BATCH_GROUPS), "--group-size", "4"]
            words = ["ledger", "--http", f"127.0.0.1:{self.port}", "--state", str(state), "--task", NAME, *bounds]
            words += ["--last-step", str(self._steps), "--lease-guess", "3"]
        else:
            engine = ["--engine", self._engine.url, "--peer", self._engine.url.removeprefix("http://")]
            bearer = ["--bearer-file", str(state / "worker.token")]
            words = ["work", f"127.0.0.1:{self.port}", "--task", NAME, "--name", name, *bearer, *engine]
        with open(self._folder / f"{name}.log", "ab") as log:  # noqa: ASYNC230 - a local file
            command = [sys.executable, "-m", "p2pcast.cli", *words]
            self.running[name] = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)

    async def kill(self, name: str) -> None:
        process = self.running.pop(name)
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()

    def said(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("*.log")))


@asynccontextmanager
async def started(folder: Path, engine: FakeEngine, steps: int) -> AsyncIterator[Processes]:
    made = Processes(folder, engine, steps)
    try:
        await made.start("ledger")
        async with asyncio.timeout(END_S):
            while not (folder / "ledger" / "daemon.json").exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
        url = json.loads((folder / "ledger" / "daemon.json").read_text())["http"]
        made.port = int(url.rpartition(":")[2])
        for name in ("w0", "w1"):
            await made.start(name)
        yield made
    finally:
        for name in list(made.running):
            await made.kill(name)
        print(made.said())


async def kills(made: Processes, learner: Learner, drawn: random.Random, count: int) -> None:
    """Kill one part after the other, each once its predecessors have done something again."""
    for _ in range(count):
        await asyncio.sleep(drawn.uniform(0.2, 1.5))
        victim = drawn.choice(["ledger", "w0", "w1", "learner"])
        if victim == "learner":
            learner.kill.set()
        elif victim in made.running:
            await made.kill(victim)
            await made.start(victim)


@pytest.mark.parametrize(("seed", "count"), [(1, 6), pytest.param(2, 40, marks=pytest.mark.prove)])
async def test_every_batch_is_trained_once_despite_kills(
    tmp_path: Path, engine: FakeEngine, seed: int, count: int
) -> None:
    engine.versions = []
    steps = 4 + count
    async with asyncio.timeout(END_S + 20 * count), started(tmp_path, engine, steps) as made:
        bearer = tmp_path / "ledger" / "http.token"
        client = BatchClient(f"http://127.0.0.1:{made.port}", bearer_file=bearer, give_up_s=END_S)
        learner = Learner(client, engine, steps)
        training = asyncio.create_task(asyncio.to_thread(learner.run))
        killing = asyncio.create_task(kills(made, learner, random.Random(seed), count))
        await asyncio.wait([training, killing], return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            killing.cancel()
        await training
        await asyncio.wait([killing])
        for name in ("w0", "w1"):  # the run has ended: each worker that hears so ends by itself
            if name in made.running:
                assert await made.running[name].wait() == 0
    check(learner, steps)


def check(learner: Learner, steps: int) -> None:
    step, batches = learner.saved
    assert (step, [batch.step for batch in batches]) == (steps, list(range(steps)))
    assert len({batch.id for batch in batches}) == steps
    jobs = [rollout.result.job for batch in batches for group in batch.groups for rollout in group.rollouts]
    groups = [group.group.id for batch in batches for group in batch.groups]
    assert len(jobs) == len(set(jobs))
    assert len(groups) == len(set(groups))
    for batch in batches:
        for rollout in (rollout for group in batch.groups for rollout in group.rollouts):
            assert rollout.result.oldest_step >= batch.step - STALENESS
