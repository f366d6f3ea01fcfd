"""Transitions of one certificate leave places for others."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from tests.support.until import until
from trainer_node.ledger.ledger_rows import BEARER
from trainer_node.ledger_server.api_server import CALLER
from trainer_node.ledger_server.transition_executors import MOST_TRANSITIONS, CallerTransitions, Executors


async def test_transitions_of_one_certificate_leave_room_for_others() -> None:
    executors = Executors.start()
    calls = CallerTransitions(executors)
    running, ends, lock = Counter[str](), threading.Event(), threading.Lock()

    def transition(name: str) -> None:
        with lock:
            running[name] += 1
        ends.wait(60)

    async def request(name: str) -> None:
        CALLER.set(name)
        await calls.call(transition, name)

    greedy = [asyncio.create_task(request("greedy")) for _ in range(64)]
    others = [asyncio.create_task(request(name)) for name in ("a", "b", BEARER)]
    async with asyncio.timeout(600):
        await until(lambda: running.total() >= MOST_TRANSITIONS + 3)
        assert running == {"greedy": MOST_TRANSITIONS, "a": 1, "b": 1, BEARER: 1}
        ends.set()
        await asyncio.gather(*greedy, *others)
    assert running["greedy"] == 64
    executors.shutdown()
