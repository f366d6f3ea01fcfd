"""``p2pcast learn``, hub and ledger, all real processes, are killed by SIGKILL: each step trains one batch, once."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from learner_run import END_S, STALENESS, started

from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import ALL_PAGES, FILE, BudgetSchedule
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.learning.monitoring.run_record import RunRecord
from trainer_node.ledger.database.ledger_store import LedgerStore

KILL_S = 90.0
"""Time in seconds that each kill adds to the limit of the whole run."""
STEPS_A_KILL = 8
TOGETHER = (
    ("learner",),
    ("ledger",),
    ("hub",),
    ("learner", "hub"),
    ("ledger", "learner"),
    ("hub", "ledger", "learner"),
)
"""Parts that are killed at the same moment."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "count"), [(1, 3), pytest.param(2, 20, marks=pytest.mark.prove)])
async def test_each_batch_is_trained_once_though_learner_ledger_and_hub_are_killed(
    tmp_path: Path, seed: int, count: int
) -> None:
    drawn, steps = random.Random(seed), STEPS_A_KILL * (count + 1)
    victims = [TOGETHER[number % len(TOGETHER)] for number in range(count)]
    drawn.shuffle(victims)
    async with asyncio.timeout(END_S + KILL_S * count), started(tmp_path, steps) as run:
        for names in victims:
            await run.until_steps(run.trained() + 1)
            await asyncio.sleep(drawn.uniform(0.0, 0.5))
            await run.kill(names)
        record = await run.end()
        newest = max(map(Version.parse, run.engine.manifests))
        assert "ALARM" in run.said("learner"), "this engine has weights of its own, whatever version is installed"
    check_record(record, steps, starts=1 + sum("learner" in names for names in victims))
    check_ledger(tmp_path / "ledger", record)
    assert newest == Version(record.starts[-1].branch or 0, steps)
    print(f"killed {dict(Counter(victims))}; {steps} steps, {len(record.superseded_steps)} more were lost")


async def test_learner_without_a_schedule_replaces_that_of_the_hub(tmp_path: Path) -> None:
    async with asyncio.timeout(END_S), started(tmp_path, 1, files={FILE: BudgetSchedule((29,)).to_bytes()}) as run:
        await run.add_peer()
        await run.until_installed(1)
        await run.end()
        assert "the hub's newest version has a schedule of sparse attention" in " ".join(run.said("learner").split())
    installed = (tmp_path / "rollout" / "latest" / FILE).read_bytes()
    assert BudgetSchedule.from_bytes(installed) == ALL_PAGES


async def test_learner_with_an_empty_folder_undoes_no_run(tmp_path: Path) -> None:
    """Neither at the ledger of the run nor at the hub alone, until a person says so."""
    checkpoints = tmp_path / "learner" / "checkpoints"
    async with asyncio.timeout(END_S), started(tmp_path, 12) as run:
        await run.until_steps(8)
        await run.fell(["learner"])
        newest = max(map(Version.parse, run.engine.manifests))
        checkpoints.rename(tmp_path / "elsewhere")
        await run.restart("learner")
        said = " ".join((await run.until_refused("learner")).split())
        assert f"{checkpoints} holds no checkpoint" in said
        assert "would begin at step 0, and the ledger http://" in said
        assert re.search(r"holds this run to step ([7-9]|1\d):", said)
        assert "--from-start" in said
        await run.fell(["worker", "ledger"])
        (tmp_path / "ledger").rename(tmp_path / "ledger-of-before")
        await run.restart("ledger")
        await run.until_file(tmp_path / "ledger" / "http.token")
        await run.restart("learner")
        said = " ".join((await run.until_refused("learner")).split())
        assert re.search(r"the hub \S+ holds version \d+\.([7-9]|1\d):", said)
        assert max(map(Version.parse, run.engine.manifests)) == newest, "the hub has published nothing"
        await run.restart("worker")
        await run.restart("learner", "--from-start")
        record = await run.end()
    assert [step.step for step in record.steps] == list(range(1, 13))


async def test_hub_with_another_base_keeps_its_weights(tmp_path: Path) -> None:
    async with asyncio.timeout(END_S), started(tmp_path, 1, base_seed=2) as run:
        said = " ".join((await run.until_refused("learner")).split())
        assert "version 0.0 of the hub" in said
        assert f"is not the model {tmp_path / 'model'}" in said
        assert set(run.engine.manifests) <= {"0.0"}
        await run.restart("learner", "--from-start")
        await run.end()


def check_record(record: RunRecord, steps: int, starts: int) -> None:
    """The learner's log: one batch a step, nothing stale, a new branch for each start."""
    assert [step.step for step in record.steps] == list(range(1, steps + 1))
    assert len({step.batch for step in record.steps}) == steps, "a batch was trained twice"
    assert all(int(age) <= STALENESS for step in record.steps for age in step.staleness)
    assert len(record.starts) == starts
    branches = [start.branch or 0 for start in record.starts]
    assert branches == sorted(set(branches)), "each start has a branch of its own"
    assert record.probes
    assert all(probe.alarm for probe in record.probes)


def check_ledger(folder: Path, record: RunRecord) -> None:
    """The ledger's rows agree with the learner's log, as far back as retention kept them."""
    store = LedgerStore(folder)
    try:
        rows = dump(store)
    finally:
        store.close()
    check_rows(rows)
    assert {row.state for row in rows["batches"]} <= {"trained", "reopened"}
    trained = sorted((row.step, bytes(row.id).hex()) for row in rows["batches"] if row.state == "trained")
    logged = [(step.step - 1, step.batch) for step in record.steps]
    assert trained
    assert trained == logged[-len(trained) :]
    assert not [row for row in rows["jobs"] if row.state in ("open", "leased")], "a job is lost"
    assert not [row for row in rows["leases"] if row.state == "held"]
