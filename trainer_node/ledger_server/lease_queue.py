"""Requests for leases that wait until there are jobs.

Promises: a change wakes each waiting request soon, oldest first. Requests of one kind stop being tried in a round once
several of them found nothing, so a thousand idle workers cost a few attempts a round. A request that has ended, or
whose caller has gone, is not tried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

from p2pcast.wakeup import Wakeup

T = TypeVar("T")

ROUND_S = 0.02
"""Least time between two rounds, in seconds."""
AT_ONCE = 16
"""Requests that are tried at the same time: their transitions share a commit."""
MOST_EMPTY = 32
"""Requests of one kind that find nothing before the others of that kind are left for the next round."""
CHECK_S = 1.0
"""Interval in seconds at which a waiting request looks whether its caller is still connected."""


class _Waiting:
    def __init__(self, kind: Hashable) -> None:
        self.kind = kind
        self.turn = asyncio.Event()
        self.tried: asyncio.Future[bool] | None = None

    def answer(self, *, found: bool) -> None:
        if self.tried is not None and not self.tried.done():
            self.tried.set_result(found)


class LeaseQueue:
    def __init__(self) -> None:
        self._waiting: dict[_Waiting, None] = {}
        self._changed = Wakeup()
        self._stale = False

    def __len__(self) -> int:
        return len(self._waiting)

    def changed(self) -> None:
        """There may be jobs now for a request that found none before."""
        self._stale = True
        self._changed.notify()

    async def ask(
        self, attempt: Callable[[], Awaitable[Sequence[T]]], kind: Hashable, wait_s: float, gone: Callable[[], bool]
    ) -> Sequence[T]:
        """The finds of ``attempt``, now or within ``wait_s``. ``kind``: requests of one kind find the same jobs."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        found = await attempt()
        if found or wait_s <= 0:
            return found
        waiting = _Waiting(kind)
        self._waiting[waiting] = None
        try:
            while not found and not gone() and (left_s := until_s - loop.time()) > 0:
                try:
                    async with asyncio.timeout(min(left_s, CHECK_S)):
                        await waiting.turn.wait()
                except TimeoutError:
                    continue
                waiting.turn.clear()
                found = await attempt()
                waiting.answer(found=bool(found))
            return found
        finally:
            del self._waiting[waiting]
            waiting.answer(found=True)

    async def run(self) -> None:
        while True:
            while not self._stale:
                await self._changed.wait()
            self._stale = False
            await self._round()
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> None:
        loop, empty = asyncio.get_running_loop(), Counter[Hashable]()
        waiting = list(self._waiting)
        while waiting:
            turn, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            tried = [one for one in turn if one in self._waiting and empty[one.kind] < MOST_EMPTY]
            for one in tried:
                one.tried = loop.create_future()
                one.turn.set()
            for one in tried:
                assert one.tried is not None
                if not await one.tried:
                    empty[one.kind] += 1
                    if one in self._waiting:  # the next round begins with the others
                        self._waiting[one] = self._waiting.pop(one)
