"""How long shares and loads of workers are kept."""

from __future__ import annotations

import pytest

from trainer_node.ledger.worker_rates import STANDING_S, STANDINGS_WORKERS_S, LeaseOutcome, WorkerLoads, WorkerRates
from trainer_node.scheduling.shares import Load

TASK = b"task"
MANY = int(2 * STANDINGS_WORKERS_S * STANDING_S)
"""Standings of so many workers are kept for twice the time of small ones."""


def kept(workers: int) -> WorkerRates:
    """Rates with a standing of time 0."""
    rates = WorkerRates(1.0)
    names = [str(number) for number in range(workers)]
    loads = {name: Load(0, 1) for name in names}
    rates.keep_standing(TASK, WorkerLoads(1, 0, 0.0, dict.fromkeys(names, 1), loads))
    return rates


def empty(rates: WorkerRates) -> None:
    """A request of worker 0 finds too few jobs."""
    rates.began("0", 0.0, LeaseOutcome(0, missing=1, emptied=True), TASK)
    rates.keep()


def is_kept(rates: WorkerRates, now_s: float) -> bool:
    return rates.standing(TASK, 1, 0, now_s) is not None


@pytest.mark.parametrize(("workers", "lasts_s"), [(2, STANDING_S), (MANY, 2 * STANDING_S)])
def test_standings_of_many_workers_are_kept_longer(workers: int, lasts_s: float) -> None:
    rates = kept(workers)
    assert is_kept(rates, 0.9 * lasts_s)
    assert not is_kept(rates, lasts_s)


def test_standing_of_few_workers_ends_with_a_request_that_found_too_few_jobs() -> None:
    rates = kept(2)
    empty(rates)
    assert not is_kept(rates, 0.0)


def test_standing_of_many_workers_is_then_kept_as_long_as_a_small_one() -> None:
    """A large standing takes long to compute, and in a pool without jobs each request finds too few."""
    rates = kept(MANY)
    empty(rates)
    assert is_kept(rates, 0.9 * STANDING_S)
    assert not is_kept(rates, STANDING_S)
    rates.keep_standing(TASK, WorkerLoads(1, 0, 1.0, {}, {str(n): Load(0, 1) for n in range(MANY)}))
    assert is_kept(rates, 1.0 + 1.5 * STANDING_S), "the next standing knows of the empty pool"
