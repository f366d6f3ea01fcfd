"""The runbooks of docs/guides/runbooks.md, run by their own commands on a run of real processes: hub, ledger, learner,
worker and peer.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from learner_run import END_S, STALENESS, LearnerRun, started

from p2pcast.ground.version import Version
from tests.runbook_blocks import blocks
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from tests.trainer_node.ledger.postgresql_cluster import postgresql
from trainer_node.learning.monitoring.run_record import RunRecord
from trainer_node.ledger.database.ledger_store import LedgerStore

PARTS = ("learner", "worker", "ledger", "hub", "peer")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.prove)])
def databases(request: pytest.FixtureRequest) -> Iterator[tuple[str | None, str | None]]:
    """Of the ledger, and empty, for the restored one."""
    if request.param == "sqlite":
        yield None, None
        return
    with postgresql() as cluster:
        yield cluster.database(), cluster.database()


def at(script: str, database: str | None) -> str:
    """The page's commands, with the database's option if there is one."""
    return script if database is None else script.replace("--ledger ledger", f"--ledger ledger --database '{database}'")


@pytest.mark.timeout(1200)
async def test_run_continues_from_a_backup_of_running_daemons(
    tmp_path: Path, databases: tuple[str | None, str | None]
) -> None:
    """The learner's newest checkpoint is newer than the backup. On SQLite the peer is lost too, so no part of the run
    knows the hub's later versions, except its shadow.
    """
    before, after = databases
    page, steps = blocks(), 14
    async with asyncio.timeout(END_S), started(tmp_path, steps, before) as run:
        await run.add_peer()
        await run.until_steps(3)
        print(await run.shell(at(page["backup"], before)))
        kept = run.trained()
        await run.until_steps(kept + 5)
        await run.until_installed(kept + 4)
        lost = newest_of(run)
        await run.fell(PARTS if after is None else PARTS[:4])
        for name in ("hub", "ledger", *(("peer", "rollout") if after is None else ())):
            shutil.rmtree(tmp_path / name)
        print(await run.shell(at(page["restore"], after)))
        if after is not None:
            run.use_database(after)
        for name in ("hub", "ledger", "learner", "worker", *(("peer",) if after is None else ())):
            await run.restart(name)
        record = await run.end()
        newest = newest_of(run)
        await run.until_installed(steps)
        said = await run.shell(f"p2pcast verify rollout/latest --against {run.url('hub')} --version {newest}")
        print(said)
    check_record(record, steps)
    check_ledger(tmp_path / "ledger", after, record)
    assert newest.branch > lost.branch, "no version of the time after the backup has other weights now"
    assert newest.step == steps


def newest_of(run: LearnerRun) -> Version:
    return max(map(Version.parse, run.engine.manifests))


def check_record(record: RunRecord, steps: int) -> None:
    assert [step.step for step in record.steps] == list(range(1, steps + 1))
    assert len({step.batch for step in record.steps}) == steps, "a batch was trained twice"
    assert all(int(age) <= STALENESS for step in record.steps for age in step.staleness)


def check_ledger(folder: Path, database: str | None, record: RunRecord) -> None:
    with closing(LedgerStore(folder, database)) as store:
        rows = dump(store)
    check_rows(rows)
    logged = {(step.step - 1, step.batch) for step in record.steps}
    trained = {(row.step, bytes(row.id).hex()) for row in rows["batches"] if row.state == "trained"}
    assert trained <= logged
    assert max(trained)[0] == record.steps[-1].step - 1
    lost = [row for row in rows["groups"] if row.reason == "restored from a backup"]
    assert all(row.state == "dropped" for row in lost)
