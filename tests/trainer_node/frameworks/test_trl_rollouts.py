"""TRL on a ledger, all real processes: hub, ledger, worker and AsyncGRPOTrainer, with the engine of 16 tokens that
follows the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Result
from tests.environments import ROOT, python_of
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.frameworks.trl import LedgerRollouts, P2PCast
from trainer_node.frameworks.trl_rollouts import POSITION
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.database.ledger_store import LedgerStore

DAEMONS = ROOT / "tests" / "daemons" / "rollouts"
sys.path += [str(DAEMONS), str(ROOT / "tests" / "rollout_node" / "vllm")]

from learner_run import END_S, LearnerRun  # noqa: E402

HERE = Path(__file__).parent
STEPS, SAVE_EVERY, KILLED_AT, SAMPLES = 6, 2, 5, 8


@pytest.fixture(autouse=True)
def _as_if_trl_were_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's environment has no TRL, and needs none to refuse settings."""
    monkeypatch.setattr(metadata, "version", lambda name: "1.16.0")


class TrlRun(LearnerRun):
    """The learner is TRL's trainer. ``stays``: the step at which the next trainer waits to be killed."""

    stays = 0

    async def _start(self, name: str, *more: str) -> None:
        if name != "learner":
            await super()._start(name, *more)
            return
        file = (self.folder / "run.toml").read_text()
        model, hub, ledger = (file.split(f'{key} = "')[1].split('"')[0] for key in ("path", "address", "url"))
        words = [model, hub, self.folder / "token", ledger, self.folder / "ledger" / "http.token", self.out]
        words += [self._steps, SAVE_EVERY, self.stays]
        python = await asyncio.to_thread(python_of, "trl")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with open(self.folder / "learner.log", "ab") as log:  # noqa: ASYNC230 - a local file
            self._running[name] = await asyncio.create_subprocess_exec(
                python, HERE / "trl_on_cpu.py", HERE / "ledger_training.py", *map(str, words),
                cwd=ROOT, stdout=log, stderr=log, env=environment,
            )  # fmt: skip

    @property
    def out(self) -> Path:
        return self.folder / "trained"

    def steps(self) -> list[dict[str, Any]]:
        """Tokens that the loss has seen in each step, also in steps that a kill has undone."""
        file = self.out / "trained.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    async def killed_at(self, step: int) -> None:
        await self._until(lambda: any(line["step"] == step for line in self.steps()))
        self.stays = 0
        await self.kill(["learner"])

    async def ended(self) -> None:
        async with asyncio.timeout(END_S):
            for name in ("learner", "worker"):
                assert await self._running[name].wait() == 0, self.said(name)
            self._running["ledger"].terminate()
            assert await self._running["ledger"].wait() == 0, self.said("ledger")


@contextlib.asynccontextmanager
async def started(folder: Path, stays: int) -> AsyncIterator[TrlRun]:
    run = TrlRun(folder, STEPS)
    run.stays = stays
    try:
        await run.begin()
        yield run
    finally:
        await run.stop()


def batches_of(folder: Path) -> dict[int, list[float]]:
    """By step of a trained batch: the log-probabilities of the tokens that its results may be learnt from."""
    store = LedgerStore(folder)
    try:
        rows = dump(store)
        check_rows(rows)
        assert {row.state for row in rows["batches"]} <= {"trained", "reopened"}
        members, found = rows["batch_members"], {}
        for batch in (row for row in rows["batches"] if row.state == "trained"):
            groups = {bytes(row.group_id) for row in members if row.batch_id == batch.id}
            jobs = {bytes(row.id) for row in rows["jobs"] if bytes(row.group_id) in groups}
            accepted = [row for row in rows["results"] if bytes(row.job_id) in jobs and row.verdict == "accepted"]
            results = [
                Result.from_bytes(store.segments.read(Place(row.segment, row.offset, row.length))) for row in accepted
            ]
            assert all(result.mask[0] == 0 for result in results)
            found[int(batch.step)] = [float(x) for one in results for x in one.logprobs[one.mask.astype(bool)]]
        return found
    finally:
        store.close()


@pytest.mark.timeout(900)
async def test_each_batch_is_trained_once_though_the_trainer_is_killed(tmp_path: Path) -> None:
    async with asyncio.timeout(END_S), started(tmp_path, KILLED_AT) as run:
        await run.killed_at(KILLED_AT)
        await run.ended()
        newest = max(map(Version.parse, run.engine.manifests))
        lines = run.steps()
    # Killed after step 5, the trainer continues from the checkpoint of step 4.
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5, 6]
    assert newest == Version(2, STEPS)
    trained = batches_of(tmp_path / "ledger")
    assert sorted(trained) == list(range(STEPS))
    lineage = {line["step"]: line for line in lines}
    for step, logprobs in trained.items():
        seen, expected = (Counter(round(x, 5) for x in found) for found in (lineage[step + 1]["logprobs"], logprobs))
        assert expected <= seen
        # A batch that is short of samples is filled; fillers have one token each, and no advantage.
        assert (seen - expected).total() <= SAMPLES - 2
    position = json.loads((run.out / f"checkpoint-{STEPS}" / POSITION).read_text())
    assert position["step"] == STEPS
    assert len(position["batches"]) == SAVE_EVERY


def test_wrong_settings_are_refused() -> None:
    transfer = P2PCast("hub:7077")
    with pytest.raises(UsageError, match="give P2PCast first_step=0"):
        LedgerRollouts("http://127.0.0.1:7079", transfer, samples_a_step=8)
    transfer.first_step = 0
    with pytest.raises(UsageError, match="at least 2 samples"):
        LedgerRollouts("http://127.0.0.1:7079", transfer, samples_a_step=1)
    rollouts = LedgerRollouts("http://127.0.0.1:7079", transfer, samples_a_step=8)
    with pytest.raises(UsageError, match="pass the same P2PCast as weight_transfer"):
        rollouts.start()


def test_checkpoint_without_batches_is_refused(tmp_path: Path) -> None:
    rollouts = LedgerRollouts("http://127.0.0.1:7079", P2PCast("hub:7077", first_step=0), samples_a_step=8)
    with pytest.raises(UsageError, match=f"resume from a checkpoint with {POSITION}"):
        rollouts.restore(tmp_path)
    (tmp_path / POSITION).write_text('{"step": 4, "batches": ["zz"], "digest": "00"}')
    with pytest.raises(UsageError, match="does not say which batches"):
        rollouts.restore(tmp_path)
