"""Simulated runs of the rollout plane: no deadlock, no stale training, every token accounted for."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netem.rollouts.rollout_simulator import simulate_run
from netem.rollouts.simulated_run import (
    BroadcastDelay,
    Control,
    Machine,
    RolloutFault,
    Samples,
    SimulatedRun,
    tokens_per_s,
)
from p2pcast.ground.errors import UsageError

MACHINES = tuple(Machine(f"w{n}", 4, 100.0 * (1 + n % 3), usd_per_h=1.0) for n in range(4))
RUN = SimulatedRun(MACHINES, BroadcastDelay(20.0), train_s=60.0, groups=4, size=4, steps=12)

QUICK = BroadcastDelay(10.0)


@st.composite
def runs(draw):
    staleness = draw(st.sampled_from([0, 1, 3, 6]))
    faults = draw(
        st.lists(
            st.builds(RolloutFault, st.sampled_from(["worker slows", "worker dies"]), st.just("w1"), st.floats(0, 900)),
            max_size=1,
        )
    )
    rule, drains = draw(st.sampled_from([("bounded", False), ("bounded", True), ("strict", True)]))
    return dataclasses.replace(
        RUN,
        broadcast=BroadcastDelay(draw(st.sampled_from([0.0, 20.0, 150.0])), chains=2),
        train_s=draw(st.sampled_from([5.0, 60.0])),
        staleness=staleness,
        every=draw(st.integers(1, staleness + 1)),
        samples=Samples(
            stragglers=draw(st.sampled_from([0.0, 0.1])),
            equal=draw(st.sampled_from([0.0, 0.4, 0.8])),
            spread=draw(st.sampled_from([0.0, 0.8])),
        ),
        policy=draw(st.sampled_from(["shares", "pull"])),
        rule=rule,
        drains=drains,
        faults=tuple(faults),
        renews=draw(st.booleans()),
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs(), seed=st.integers(0, 1 << 32))
def test_every_run_ends_within_the_staleness_bound(run, seed):
    figures = simulate_run(run, seed)
    assert not figures.deadlock
    assert len(figures.applied_s) == run.steps
    assert figures.worst_staleness <= run.staleness
    assert figures.tokens["trained"] > 0
    sampled = figures.timeline_tokens
    assert sum(figures.tokens.values()) == pytest.approx(sampled, rel=0.001, abs=100)


@pytest.mark.parametrize("staleness", [0, 1, 3, 6])
def test_stragglers_and_filters_waste_no_more_than_seven_per_cent(staleness):
    for every in range(1, staleness + 2):
        samples = Samples(stragglers=0.02, straggler_factor=8, equal=0.3)
        run = dataclasses.replace(
            RUN, staleness=staleness, every=every, samples=samples, steps=30, size=8, train_s=15.0, broadcast=QUICK
        )
        assert simulate_run(run, 3).wasted_share <= 0.07


def test_same_seed_gives_the_same_run():
    first, second = simulate_run(RUN, 7), simulate_run(RUN, 7)
    assert (first.applied_s, first.tokens, first.staleness) == (second.applied_s, second.tokens, second.staleness)


def test_jobs_of_a_dead_worker_are_done_elsewhere():
    figures = simulate_run(dataclasses.replace(RUN, faults=(RolloutFault("worker dies", "w2", 10.0),)), 2)
    assert figures.redone_s
    assert figures.tokens["lost"] > 0
    assert not figures.deadlock


def test_a_run_that_cannot_go_on_is_reported_as_deadlocked():
    alone = dataclasses.replace(RUN, machines=MACHINES[:1], faults=(RolloutFault("worker dies", "w0", 100.0),))
    assert simulate_run(alone).deadlock


@pytest.mark.parametrize(
    "change",
    [
        {"every": 5},
        {"machines": ()},
        {"faults": (RolloutFault("worker dies", "stranger"),)},
        {"faults": (RolloutFault("worker sleeps", "w1"),)},
        {"policy": "lottery"},
        {"train_s": 0.0},
    ],
)
def test_impossible_runs_are_refused(change):
    with pytest.raises(UsageError):
        simulate_run(dataclasses.replace(RUN, **change))


def test_a_slow_worker_costs_the_others_nothing():
    few = dataclasses.replace(RUN, machines=MACHINES[:3], steps=20)
    slow = dataclasses.replace(few, machines=(*MACHINES[:3], Machine("slow", 4, 3.0)))
    assert simulate_run(slow, 5).wall_s <= 1.05 * simulate_run(few, 5).wall_s


def test_a_worker_that_dies_at_the_start_costs_the_others_one_lease():
    few = dataclasses.replace(RUN, machines=MACHINES[:3], steps=20, lease_guess_s=60.0)
    dead = dataclasses.replace(few, machines=MACHINES, faults=(RolloutFault("worker dies", "w3", 1.0),))
    assert simulate_run(dead, 5).wall_s <= simulate_run(few, 5).wall_s + 2 * few.lease_guess_s


def test_surplus_workers_are_drained_and_lose_no_tokens():
    capacity = tokens_per_s(MACHINES)
    control = Control(capacity / 4, look_s=10.0)
    figures = simulate_run(dataclasses.replace(RUN, steps=20, control=control), 4)
    assert figures.released > 0
    assert figures.tokens["lost"] == 0
    assert not figures.deadlock


def test_a_replacement_is_started_once():
    spare = Machine("spare", 4, 300.0, ready_s=200.0)
    spares = tuple(dataclasses.replace(spare, name=f"spare-{n}") for n in range(3))
    capacity = tokens_per_s(MACHINES)
    run = dataclasses.replace(
        RUN, steps=20, faults=(RolloutFault("worker dies", "w2", 30.0),), control=Control(0.99 * capacity, spares)
    )
    figures = simulate_run(run, 4)
    assert figures.started == 1
    assert figures.recovered_s is not None
