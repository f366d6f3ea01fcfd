"""Figures of an RL run, by phases with and without a cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from netem.rl_lab.phase_figures import (
    PhaseRecord,
    RunPhase,
    RunSample,
    accepted,
    caught_up_s,
    figures,
    learner_s,
    live_s,
    shares,
)

PHASE = RunPhase("before", 100.0, 120.0, ("e", "w"))


def step(at_s: float, wait_s: float, train_s: float, ages: dict[str, int] | None = None) -> dict[str, Any]:
    return {"time": at_s, "wait_s": wait_s, "train_s": train_s, "staleness": ages or {"1": 4}}


def test_tokens_are_counted_between_looks_and_by_every_host() -> None:
    looks = [RunSample(90.0 + 20 * n, {"e": 1000 * n, "w": 500 * n}, {}) for n in range(3)]
    assert accepted(PhaseRecord(samples=looks), PHASE) == pytest.approx(1500)
    assert accepted(PhaseRecord(samples=looks), RunPhase("after", 120.0, 500.0, ())) == pytest.approx(750)
    assert accepted(PhaseRecord(), PHASE) == 0


def test_waiting_beyond_a_phase_is_left_out() -> None:
    steps = [step(104.0, 2.0, 8.0), step(116.0, 4.0, 8.0), step(130.0, 6.0, 8.0)]
    # 100 to 104 training, to 108 waiting, to 116 training, then waiting until 122.
    assert learner_s(PhaseRecord(steps=steps), PHASE) == pytest.approx((8, 12))
    assert figures(PhaseRecord(steps=steps), PHASE)["bubble"] == 0.4


def test_time_after_the_last_step_is_waiting() -> None:
    assert learner_s(PhaseRecord(steps=[step(105.0, 0.0, 5.0)]), PHASE) == pytest.approx((15, 5))
    assert learner_s(PhaseRecord(), PHASE) == (20, 0)


def test_a_version_is_live_once_every_reachable_engine_has_switched() -> None:
    run = PhaseRecord(opened={"1.3": 101.0}, committed={"e": {"1.3": 102.0}, "w": {"1.3": 104.5}})
    assert live_s(run, "1.3", ("e", "w")) == 3.5
    assert live_s(run, "1.3", ("e",)) == 1.0
    assert live_s(run, "1.3", ("e", "w", "s")) is None


def test_a_host_has_caught_up_with_a_version_as_new_as_the_newest_at_that_time() -> None:
    opened = {"1.1": 100.0, "1.2": 110.0, "1.3": 121.0}
    run = PhaseRecord(opened=opened, committed={"w": {"1.1": 101.0, "1.3": 125.0}})
    assert caught_up_s(run, "w", 120.0) == 5.0
    assert caught_up_s(run, "e", 120.0) is None
    assert caught_up_s(run, "w", 105.0) == 0.0, "the host has the newest version already"


def test_a_row_holds_the_steps_versions_and_bytes_of_its_phase_alone() -> None:
    looks = [
        RunSample(at_s, {"e": 0}, {"east": (n * 600, 0), "west": (n * 200, 0)}) for n, at_s in enumerate((100.0, 120.0))
    ]
    run = PhaseRecord(
        [step(99.0, 0.0, 1.0), step(110.0, 1.0, 8.0, {"0": 1, "1": 3}), step(119.0, 1.0, 8.0), step(121.0, 0.0, 2.0)],
        looks,
        {"1.1": 99.0, "1.2": 110.0, "1.3": 119.0},
        {"1.2": 10, "1.3": 20},
        {"e": {"1.2": 111.0}, "w": {"1.2": 112.0}},
    )
    row = figures(run, PHASE)
    assert (row["steps"], row["step_s"], row["versions"], row["skipped"]) == (2, 10.0, 2, 1)
    assert (row["version_s"], row["version_bytes"], row["trunk_bytes"]) == (2.0, 15, 200)
    assert (row["staleness_max"], row["staleness_mean"], row["staleness"]) == (1, 0.875, "0: 12 %, 1: 88 %")


def test_a_phase_without_steps_has_a_row() -> None:
    row = figures(PhaseRecord(), PHASE)
    assert (row["steps"], row["step_s"], row["staleness_max"], row["version_s"], row["trunk_bytes"]) == (0, *4 * [None])
    assert shares(Counter()) == ""
