"""The hub shows the newest summary of the ledger, and takes nothing else than a small, flat one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from p2pcast.ground.errors import UsageError
from trainer_node.rollout_summary import MAX_FIELDS, MAX_ROWS, MAX_TEXT, RolloutSummary

GOOD = {
    "task": "sums",
    "workers": 3,
    "finished": False,
    "rate": 1.5,
    "delayed": None,
    "leases": {"held": 4},
    "worker_rows": [{"name": "w", "leases": 4}],
}


class Clock:
    now_s = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def summary(clock: Clock) -> RolloutSummary:
    return RolloutSummary(lambda: clock.now_s)


async def test_the_newest_summary_is_shown_with_its_age(summary: RolloutSummary, clock: Clock) -> None:
    assert summary.document() is None
    for workers in (1, 3):
        assert await summary.command(GOOD | {"workers": workers}) == {"drains": {}}
    clock.now_s += 2
    assert summary.document() == GOOD | {"age_s": 2.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [1]},
        {"rows": [{"name": "w"}] * (MAX_ROWS + 1)},
        {"rows": [{"name": ["w"]}]},
        {"rows": [{"name": "x" * (MAX_TEXT + 1)}]},
        {"rows": [{str(number): number for number in range(MAX_FIELDS + 1)}]},
        {"leases": {"held": "4"}},
        {"leases": {"held": {"deep": 1}}},
        {"leases": {"held": None}},
        {"workers": math.nan},
        {"workers": math.inf},
        {"workers": 1 << 63},
        {"task": "x" * (MAX_TEXT + 1)},
        {"x" * (MAX_TEXT + 1): 1},
        {str(number): number for number in range(MAX_FIELDS)},
        {"leases": {str(number): number for number in range(MAX_FIELDS + 1)}},
    ],
)
async def test_another_shape_is_refused_and_the_newest_summary_stays(
    summary: RolloutSummary, wrong: dict[str, Any]
) -> None:
    await summary.command(GOOD)
    with pytest.raises(UsageError):
        await summary.command(GOOD | wrong)
    shown = summary.document()
    assert shown == GOOD | {"age_s": 0.0}
    json.dumps(shown, allow_nan=False)


async def test_a_ledger_may_not_state_its_own_age(summary: RolloutSummary) -> None:
    await summary.command(GOOD | {"age_s": -5})
    assert (summary.document() or {})["age_s"] == 0.0
