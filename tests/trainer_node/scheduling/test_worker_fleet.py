"""The cheapest fleet, and when it changes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from trainer_node.scheduling.worker_fleet import (
    MEASUREMENTS,
    NO_CHANGE,
    RELEASE_MARGIN,
    WINDOW_S,
    CandidateWorker,
    FleetControl,
    cheapest,
)

CANDIDATES = st.lists(
    st.builds(CandidateWorker, st.integers(0, 99).map(str), st.floats(0.1, 50), st.floats(0, 20)),
    max_size=8,
    unique_by=lambda c: c.name,
)


def cost(fleet) -> float:
    return sum(c.usd_per_h for c in fleet)


def rate(fleet) -> float:
    return sum(c.rollouts_per_s for c in fleet)


def prefix(candidates, target):
    chosen = []
    for one in sorted((c for c in candidates if c.rollouts_per_s > 0), key=lambda c: (c.usd_per_rollout, c.name)):
        if rate(chosen) >= target:
            break
        chosen.append(one)
    return chosen


@given(CANDIDATES, st.floats(0.1, 60))
def test_fleet_reaches_the_target_at_no_more_than_the_prefix_costs(candidates, target):
    fleet = cheapest(candidates, target)
    if rate([c for c in candidates if c.rollouts_per_s > 0]) < target * (1 - 1e-9):
        assert fleet is None
    elif fleet is not None:
        assert rate(fleet) >= target * (1 - 1e-9)
        assert cost(fleet) <= cost(prefix(candidates, target)) + 1e-9
        every = (set(s) for n in range(len(candidates) + 1) for s in itertools.combinations(candidates, n))
        best = min(cost(s) for s in every if rate(s) >= target * (1 - 1e-9))
        # The greedy rule overshoots by less than its last member.
        assert cost(fleet) <= best + max(c.usd_per_h for c in fleet) + 1e-9


def test_a_small_cheap_worker_that_a_large_one_makes_needless_is_left_out():
    small, large = CandidateWorker("small", 0.5, 1.0), CandidateWorker("large", 6.0, 10.0)
    assert cheapest([small, large], 10.0) == [large]


def measure_repeatedly(control: FleetControl, times, target, active, standby):
    return [control.decide(at, target, active, standby) for at in times]


SPREAD = [n * WINDOW_S / (MEASUREMENTS - 1) for n in range(MEASUREMENTS)]
CHEAP, DEAR = CandidateWorker("cheap", 1.0, 10.0), CandidateWorker("dear", 5.0, 10.0)


def test_the_cheapest_standby_is_activated_after_a_sustained_shortfall():
    *early, last = measure_repeatedly(FleetControl(), SPREAD, 15.0, [CandidateWorker("busy", 1.0, 10.0)], [DEAR, CHEAP])
    assert early == [NO_CHANGE] * (MEASUREMENTS - 1)
    assert last.activate == (CHEAP,)


def test_short_or_interrupted_deviations_change_nothing():
    control, active = FleetControl(), [CandidateWorker("busy", 1.0, 10.0)]
    assert measure_repeatedly(control, [0, 1, 2, 3], 15.0, active, [CHEAP]) == [NO_CHANGE] * 4
    assert control.decide(WINDOW_S - 1, 10.0, active, [CHEAP]) == NO_CHANGE, (
        "the target is met: the measurements begin anew"
    )
    assert measure_repeatedly(control, [WINDOW_S, WINDOW_S + 1], 15.0, active, [CHEAP]) == [NO_CHANGE] * 2


def test_the_dearest_worker_is_released_only_above_the_margin():
    active = [CHEAP, DEAR, CandidateWorker("middle", 2.0, 10.0)]
    within = 30.0 / (1 + RELEASE_MARGIN) + 0.1
    assert measure_repeatedly(FleetControl(), SPREAD, within, active, []) == [NO_CHANGE] * MEASUREMENTS
    assert measure_repeatedly(FleetControl(), SPREAD, 20.0, active, [])[-1].release == (DEAR,)
    assert measure_repeatedly(FleetControl(), SPREAD, 22.0, active, [])[-1] == NO_CHANGE, "all three are needed"


@given(CANDIDATES, st.floats(0.1, 60), st.integers(0, 8))
def test_the_fleet_settles_and_never_oscillates(candidates, target, at_first):
    control, active, standby, changes = FleetControl(), candidates[:at_first], candidates[at_first:], 0
    for number in range(60):
        change = control.decide(number * WINDOW_S / 2, target, active, standby)
        changes += change != NO_CHANGE
        active = [c for c in [*active, *change.activate] if c not in change.release]
        standby = [c for c in [*standby, *change.release] if c not in change.activate]
    assert changes <= 2
    if rate(candidates) >= target * (1 + 1e-9):
        assert rate(active) >= target * (1 - 1e-9)
