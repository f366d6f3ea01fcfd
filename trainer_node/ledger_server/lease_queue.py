"""Requests for leases that wait until there are jobs.

Guarantees: a change wakes the waiting requests soon, oldest first. In a round, requests of one kind are tried until one
of them learns that there are no jobs for any of them, or several have found nothing. So a change costs few attempts
though a thousand idle workers wait. A request that has ended, or whose caller has gone, is not tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence

from p2pcast.ground.wakeup import Wakeup
from p2pcast.ledger_api.worker_api import Leased
from trainer_node.ledger.leasing import Grant

ROUND_S = 0.02
"""Least time between two rounds, in seconds."""
AT_ONCE = 16
"""Requests that are tried at the same time: their transitions share a commit."""
MOST_EMPTY = 32
"""Requests of one kind that find nothing before the others of that kind are left for the next round."""
CHECK_S = 1.0
"""Interval in seconds at which a waiting request looks whether its caller is still connected."""
_ENDED = Grant([])


class _Waiting:
    def __init__(self, kind: Hashable) -> None:
        self.kind = kind
        self.turn = asyncio.Event()
        self.tried: asyncio.Future[Grant] | None = None

    def answer(self, found: Grant) -> None:
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
        self, attempt: Callable[[], Awaitable[Grant]], kind: Hashable, wait_s: float, gone: Callable[[], bool]
    ) -> list[Leased]:
        """The leases of ``attempt``, now or within ``wait_s``. ``kind``: requests of one kind find the same jobs."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        found = await attempt()
        if found.leases or wait_s <= 0:
            return found.leases
        waiting = _Waiting(kind)
        self._waiting[waiting] = None
        try:
            while not found.leases and not gone() and (left_s := until_s - loop.time()) > 0:
                try:
                    async with asyncio.timeout(min(left_s, CHECK_S)):
                        await waiting.turn.wait()
                except TimeoutError:
                    continue
                waiting.turn.clear()
                found = await attempt()
                waiting.answer(found)
            return found.leases
        finally:
            del self._waiting[waiting]
            waiting.answer(_ENDED)

    async def run(self) -> None:
        while True:
            while not self._stale:
                await self._changed.wait()
            self._stale = False
            await self._round()
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> None:
        kinds: dict[Hashable, list[_Waiting]] = {}
        for one in self._waiting:
            kinds.setdefault(one.kind, []).append(one)
        for requests in kinds.values():
            await self._try(requests)

    async def _try(self, requests: Sequence[_Waiting]) -> None:
        """Requests of one kind, the first one alone."""
        empty, at_once = 0, 1
        while requests and empty < MOST_EMPTY:
            turn, requests, at_once = requests[:at_once], requests[at_once:], AT_ONCE
            found = await self._turn([one for one in turn if one in self._waiting])
            if any(one.exhausted for one in found):
                return
            empty += sum(one is not _ENDED and not one.leases for one in found)

    async def _turn(self, turn: Sequence[_Waiting]) -> list[Grant]:
        loop, found = asyncio.get_running_loop(), []
        for one in turn:
            one.tried = loop.create_future()
            one.turn.set()
        for one in turn:
            assert one.tried is not None
            found.append(await one.tried)
            if one in self._waiting and not found[-1].exhausted:  # the next round begins with the others
                self._waiting[one] = self._waiting.pop(one)
        return found
