"""Ledger, workers and learner die at transaction boundaries, on SQLite and on a real PostgreSQL. No job is lost, no
result counts twice, no batch is trained twice in a lineage, and no result is older than the bound.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.trainer_node.ledger.crash_points import Point, Points, memory_folder
from tests.trainer_node.ledger.crash_run import CrashRun, bounded
from tests.trainer_node.ledger.postgresql_cluster import Cluster

Enumerated = Callable[[str, int, int], Points]
"""All points of a run on a database, by its seed and staleness bound."""
RUNS = (("sqlite", 1, 1), ("postgresql", 2, 2))
CALLS = (
    *("register", "grant", "heartbeat", "give_back", "results", "add_prompts", "expire", "prune"),
    *("take", "applied", "ack", "publish", "resume"),
)
PARTS = 12
"""Of the points of one run: a test each."""


@pytest.fixture
def enumerated(request: pytest.FixtureRequest) -> Iterator[Enumerated]:
    with ExitStack() as stack:

        def made(database: str, seed: int, staleness: int) -> Points:
            url = None
            if database == "postgresql":
                # The server does not crash here: no commit needs the disk.
                url = request.getfixturevalue("cluster").database() + "&options=-csynchronous_commit%3Doff"
            points = Points(stack.enter_context(memory_folder()), url, seed, staleness)
            stack.callback(points.close)
            return points

        yield made


def _sample(points: list[Point], count: int, seed: int) -> list[Point]:
    """Points of kinds that differ, as many as there are kinds."""
    drawn = random.Random(seed)
    drawn.shuffle(points)
    kinds = list({point.kind.replace("w1", "w0").replace("w2", "w0"): point for point in points}.values())
    return drawn.sample(kinds, count)


def test_points_cover_each_part_and_each_transaction(enumerated: Enumerated) -> None:
    kinds = {point.kind for point in enumerated("sqlite", 1, 1).all}
    for moment in ("before fsync", "before commit", "after commit"):
        assert {f"ledger: {moment} of {call}" for call in CALLS} <= kinds
    for moment in ("before", "no answer to"):
        assert {f"w0: {moment} {call}" for call in CALLS[:3]} <= kinds
        assert {f"learner: {moment} {call}" for call in ("resume", "publish", "take", "applied", "ack")} <= kinds
    for moment in ("before", "after"):
        assert {f"learner: {moment} the optimiser's step", f"learner: {moment} the checkpoint"} <= kinds


@pytest.mark.parametrize(("database", "seed", "staleness", "count"), [(*RUNS[0], 8), (*RUNS[1], 4)])
def test_deaths_at_some_points_lose_nothing(
    enumerated: Enumerated, database: str, seed: int, staleness: int, count: int
) -> None:
    points = enumerated(database, seed, staleness)
    assert points.die(_sample(list(points.all), count, seed)) == count


@pytest.mark.prove
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("database", "seed", "staleness"), RUNS)
def test_deaths_at_every_point_lose_nothing(
    enumerated: Enumerated, database: str, seed: int, staleness: int, part: int
) -> None:
    points = enumerated(database, seed, staleness)
    assert points.die(points.all[part::PARTS]) >= 300 // PARTS
    print(f"{len(points.all)} points, {len(points.all[part::PARTS])} deaths")


def _whole_run(folder: Path, seed: int, steps: int, database: str | None = None) -> CrashRun:
    run = CrashRun(folder, seed, kill=0.04, policy=bounded(seed % 4), database=database)
    run.until(lambda: run.saved[0] >= steps, 20_000)
    run.ledger.close()
    return run


def test_run_ends_though_the_ledger_dies_again_and_again(tmp_path: Path) -> None:
    run = _whole_run(tmp_path, 1, 6)
    assert run.kills >= 10
    assert run.points["before fsync"]
    assert run.points["before commit"]


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(4))
def test_longer_run_ends_though_the_ledger_dies_again_and_again(tmp_path: Path, seed: int) -> None:
    assert _whole_run(tmp_path, seed, 20).kills >= 20


@pytest.mark.prove  # test_deaths_at_some_points_lose_nothing is the sample
def test_run_ends_on_postgresql_though_the_ledger_dies_again_and_again(tmp_path: Path, cluster: Cluster) -> None:
    assert _whole_run(tmp_path, 1, 4, cluster.database()).kills >= 5
