"""Orders about workers at the hub: repeated until they lapse, few, and refused while no ledger would hear of them."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ledger_api.api_route import MAX_DRAIN_S
from trainer_node.rollout_summary import HEARD_S, RolloutSummary
from trainer_node.worker_orders import ADMIT_S, MAX_ORDERS


class Clock:
    now_s = 5.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def summary(clock: Clock) -> RolloutSummary:
    found = RolloutSummary(lambda: clock.now_s)
    await found.command({"task": "sums"})
    return found


async def answered(summary: RolloutSummary) -> Any:
    return (await summary.command({"task": "sums"}))["drains"]


async def test_an_order_is_repeated_until_its_end(summary: RolloutSummary, clock: Clock) -> None:
    assert await summary.orders.command({"name": "w", "for_s": 60}) == {"name": "w", "for_s": 60}
    assert await answered(summary) == {"w": 60.0}
    clock.now_s += 59
    assert await answered(summary) == {"w": 1.0}
    clock.now_s += 1
    assert await answered(summary) == {}


async def test_a_later_order_takes_the_place_of_an_earlier_one(summary: RolloutSummary, clock: Clock) -> None:
    await summary.orders.command({"name": "w", "for_s": 60})
    await summary.orders.command({"name": "w", "for_s": 0})
    assert await answered(summary) == {"w": 0.0}
    clock.now_s += ADMIT_S
    assert await answered(summary) == {}


async def test_orders_without_a_ledger_are_refused(summary: RolloutSummary, clock: Clock) -> None:
    clock.now_s += HEARD_S
    with pytest.raises(RefusedError, match="no ledger tells this hub"):
        await summary.orders.command({"name": "w", "for_s": 60})
    with pytest.raises(RefusedError, match="no ledger tells this hub"):
        await RolloutSummary().orders.command({"name": "w", "for_s": 60})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "name the worker"),
        ({"name": "", "for_s": 1}, "name the worker"),
        ({"name": "x" * 129, "for_s": 1}, "name the worker"),
        ({"name": "w"}, "for how long"),
        ({"name": "w", "for_s": True}, "for how long"),
        ({"name": "w", "for_s": float("inf")}, "for how long"),
        ({"name": "w", "for_s": -1}, "0 to 86400"),
        ({"name": "w", "for_s": MAX_DRAIN_S + 1}, "0 to 86400"),
    ],
)
async def test_orders_of_another_form_are_refused(summary: RolloutSummary, body: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        await summary.orders.command(body)
    assert await answered(summary) == {}


async def test_the_number_of_orders_is_bounded(summary: RolloutSummary, clock: Clock) -> None:
    for number in range(MAX_ORDERS):
        await summary.orders.command({"name": f"w{number}", "for_s": 60})
    with pytest.raises(RefusedError, match="64 workers"):
        await summary.orders.command({"name": "one more", "for_s": 60})
    await summary.orders.command({"name": "w3", "for_s": 0})
    clock.now_s += 60
    await summary.command({"task": "sums"})
    await summary.orders.command({"name": "one more", "for_s": 60})
