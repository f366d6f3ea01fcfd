"""Room for requests: bounded for each caller, so that a slow one delays itself alone."""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.daemon.request_body import BodyTooLargeError
from trainer_node.ledger.ledger_rows import CapReachedError
from trainer_node.ledger_server import body_budget
from trainer_node.ledger_server.body_budget import BODY_BYTES, BodyBudget


async def _holding(budget: BodyBudget, caller: str, size: int, until: asyncio.Event) -> None:
    async with budget.room(caller, size):
        await until.wait()


async def test_a_caller_fills_its_own_share_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "WAIT_S", 0.05)
    budget, done = BodyBudget(100, 40), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(_holding(budget, "slow", 20, done))
        await asyncio.sleep(0)
        with pytest.raises(CapReachedError, match="too many requests"):
            async with budget.room("slow", 1):
                pass
        async with budget.room("other", 40):
            done.set()
    async with budget.room("slow", 40):
        pass


async def test_requests_wait_for_room() -> None:
    budget, done = BodyBudget(40, 40), asyncio.Event()
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        group.create_task(_holding(budget, "a", 40, done))
        await asyncio.sleep(0)
        waiting = [group.create_task(_holding(budget, name, 40, done)) for name in "bc"]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        done.set()


async def test_a_request_above_the_limit_never_waits() -> None:
    with pytest.raises(BodyTooLargeError, match="fewer records"):
        async with BodyBudget().room("a", BODY_BYTES + 1):
            pass
