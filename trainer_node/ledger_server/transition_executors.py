"""Threads in which transitions wait for their commits, and the turns in which callers get them.

Guarantee: an urgent transition waits for no thread behind others that wait for a later commit than its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, ParamSpec, TypeVar

from trainer_node.ledger.ledger_rows import BEARER
from trainer_node.ledger_server.api_server import CALLER
from trainer_node.ledger_server.rewards.reward_desk import Turns

P = ParamSpec("P")
T = TypeVar("T")

THREADS: Final = 32
"""Transitions that may wait for a commit at one time; they share commits."""
URGENT_THREADS: Final = 16
"""The same for urgent ones."""
MOST_TRANSITIONS: Final = 8
"""Transitions of one certificate at one time: a worker needs about three."""


class Executors(NamedTuple):
    ordinary: Executor
    urgent: Executor

    @classmethod
    def start(cls) -> Executors:
        return cls(
            ThreadPoolExecutor(THREADS, thread_name_prefix="p2pcast-ledger"),
            ThreadPoolExecutor(URGENT_THREADS, thread_name_prefix="p2pcast-ledger-urgent"),
        )

    def shutdown(self) -> None:
        for one in self:
            one.shutdown()


class CallerTransitions:
    """Runs the transitions of requests without blocking the event loop."""

    def __init__(self, executors: Executors) -> None:
        self._executors = executors
        self._turns = Turns(THREADS, MOST_TRANSITIONS)

    async def call(self, transition: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
        return await self._run(self._executors.ordinary, partial(transition, *words, **named))

    async def urgent(self, transition: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
        return await self._run(self._executors.urgent, partial(transition, *words, **named))

    async def _run(self, executor: Executor, call: Callable[[], T]) -> T:
        async with self.turn():
            return await asyncio.get_running_loop().run_in_executor(executor, call)

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait for the caller's turn. Holders of a bearer token cannot be told apart and are not counted."""
        name = CALLER.get()
        return contextlib.nullcontext() if name == BEARER else self._turns.place(name)
