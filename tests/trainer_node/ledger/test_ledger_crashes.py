"""The ledger dies at transaction boundaries, on SQLite and on a real PostgreSQL: nothing is lost or counted twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_node.ledger.crash_run import CrashRun, bounded
from tests.trainer_node.ledger.postgresql_cluster import Cluster


def _whole_run(folder: Path, seed: int, steps: int, database: str | None = None) -> CrashRun:
    run = CrashRun(folder, seed, kill=0.04, policy=bounded(seed % 4), database=database)
    run.until(lambda: run.saved[0] >= steps, 20_000)
    run.ledger.close()
    return run


def test_run_ends_though_the_ledger_dies_at_boundaries(tmp_path: Path) -> None:
    runs = [_whole_run(tmp_path / str(seed), seed, 6) for seed in (1, 2)]
    assert sum(run.kills for run in runs) >= 20
    assert all(run.points["before fsync"] and run.points["before commit"] for run in runs)


@pytest.mark.prove
def test_three_hundred_deaths_lose_nothing(tmp_path: Path) -> None:
    kills = sum(_whole_run(tmp_path / str(seed), seed, 30).kills for seed in range(12))
    assert kills >= 300


def test_run_ends_on_postgresql_though_the_ledger_dies(tmp_path: Path, cluster: Cluster) -> None:
    assert _whole_run(tmp_path, 1, 4, cluster.database()).kills >= 5
