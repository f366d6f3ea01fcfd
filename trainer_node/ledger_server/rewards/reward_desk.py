"""Rewards of results that workers hand in: each computed once, and in turns of the callers.

Guarantees: a result that is sent again while its reward is computed starts no second check. Callers get equal shares of
the time, so a caller whose checks take long delays another caller by one turn, which is one check, or a few short ones.
Then the other goes on for as long, and for twice as long after each further long turn. The last free place is for a
caller that has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from p2pcast.ground.errors import RetryableError
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result
from trainer_node.ledger.acceptance import Rejection

Reward = float | Rejection
_Key = tuple[bytes, bytes, bytes]
"""Job, lease, and the digest of the result."""


SHORT_S = 0.1
"""Longest short turn, in seconds: the unit of shares."""
MOST_DOUBLINGS = 10
SHORT_TURNS = 16
"""Short turns that take back one doubling."""


@dataclass(slots=True)
class _Caller:
    """``running``: places. ``since``: the turn after which the caller waits. ``used``: time of its turns in SHORT_S,
    counted from that of the callers at its arrival. ``doublings``: of the count, by long turns.
    """

    since: int
    used: int
    running: int = 0
    doublings: float = 0.0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def active(self) -> bool:
        return bool(self.running) or any(not turn.cancelled() for turn in self.waiting)

    def charge(self, took_s: float) -> None:
        count = max(1, round(took_s / SHORT_S))
        self.used += count << int(self.doublings)
        change = 1.0 if count > 1 else -1 / SHORT_TURNS
        self.doublings = min(max(0.0, self.doublings + change), MOST_DOUBLINGS)


class Turns:
    """``places``: pieces of work that run at once; ``most``: of one caller. ``clock``: seconds."""

    def __init__(self, places: int, most: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._free, self._most = places, places if most is None else most
        self._clock = clock
        self._callers: dict[str, _Caller] = {}
        """Callers whose work runs or waits, and those that have used more than their share."""
        self._turns = 0
        """Turns so far."""
        self._used = 0
        """``used`` of the caller that had the newest turn."""

    @contextlib.asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Before a caller that had its turn since, and after one that has waited for longer.
        caller = self._callers.setdefault(name, _Caller(self._turns - 1, self._used))
        caller.used = max(caller.used, self._used)
        caller.waiting.append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget()
            else:  # the turn came at the same time
                self._give_back(caller)
            raise
        began_s = self._clock()
        try:
            yield
        finally:
            caller.charge(self._clock() - began_s)
            self._give_back(caller)

    def _give_back(self, caller: _Caller) -> None:
        self._free += 1
        caller.running -= 1
        self._hand_out()
        self._forget()

    def _forget(self) -> None:
        """Callers without work that owe nothing; all callers when none has work."""
        active = any(caller.active for caller in self._callers.values())
        for name, caller in list(self._callers.items()):
            if not active or (caller.used <= self._used and not caller.active):
                del self._callers[name]

    def _hand_out(self) -> None:
        while self._free and (caller := self._next()) is not None:
            self._turns += 1
            self._free -= 1
            caller.since = self._turns
            self._used = max(self._used, caller.used)
            caller.running += 1
            caller.waiting.popleft().set_result(None)

    def _next(self) -> _Caller | None:
        """Of the waiting callers with the fewest places, the one that has used the least time. Of equal ones, the one
        that has waited for the most turns of others.
        """
        for caller in self._callers.values():
            while caller.waiting and caller.waiting[0].cancelled():
                caller.waiting.popleft()
        waiting = [caller for caller in self._callers.values() if caller.waiting]
        if not waiting:
            return None
        caller = min(waiting, key=lambda one: (one.running, one.used, one.since))
        fits = caller.running < self._most and (self._free > 1 or not caller.running)
        return caller if fits else None


class _Shared:
    """The reward of one result. ``askers``: requests that need it."""

    def __init__(self) -> None:
        self.found: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self.askers = 0


class RewardDesk:
    """``score``: the rewards of the first results that it is given, at least of one, from jobs and tokens, or why there
    are none; raises P2PCastError. ``places``: turns at once.
    """

    def __init__(
        self, score: Callable[[Sequence[tuple[Job, Result]]], Awaitable[Sequence[Reward]]], places: int
    ) -> None:
        self._score, self._places = score, places
        self._turns = Turns(places)
        self._together = 1
        """Checks to ask for in a turn: twice as many as were done in the last one."""
        self._shared: dict[_Key, _Shared] = {}

    @contextlib.asynccontextmanager
    async def rewards(
        self, caller: str, jobs: Sequence[Job | None], results: Sequence[Result]
    ) -> AsyncIterator[list[Reward | None]]:
        """The rewards of one request, None for results without a job. A request that is repeated before the end of the
        block finds them again. Raises what ``score`` raises.
        """
        wanted = [(job, result) for job, result in zip(jobs, results, strict=True) if job is not None]
        with contextlib.ExitStack() as stack:
            begun = [stack.enter_context(self._asked((r.job, r.lease, r.digest()))) for _, r in wanted]
            left = deque((shared, one) for (shared, first), one in zip(begun, wanted, strict=True) if first)
            checks = [self._check(caller, left) for _ in range(min(self._places, len(left)))]
            # The futures are of all requests: a caller that has gone must not cancel them.
            others = [asyncio.shield(shared.found) for shared, first in begun if not first]
            # All of them end here: a request that is repeated after a failure must not meet checks that still run.
            await asyncio.gather(*checks, *others, return_exceptions=True)
            found = iter([shared.found.result() for shared, _ in begun])
            yield [None if job is None else next(found) for job in jobs]

    @contextlib.contextmanager
    def _asked(self, key: _Key) -> Iterator[tuple[_Shared, bool]]:
        """The reward's record, and whether this request computes it."""
        first = key not in self._shared
        shared = self._shared.setdefault(key, _Shared())
        shared.askers += 1
        try:
            yield shared, first
        finally:
            shared.askers -= 1
            if not shared.askers:
                del self._shared[key]

    async def _check(self, caller: str, left: deque[tuple[_Shared, tuple[Job, Result]]]) -> None:
        """Checks of a request until none is left, in turns; as many of these run as there are places."""
        part: list[tuple[_Shared, tuple[Job, Result]]] = []
        try:
            while left:
                async with self._turns.place(caller):
                    count = min(math.ceil(len(left) / self._places), self._together)
                    part = [left.popleft() for _ in range(count)]
                    rewards = await self._score([one for _, one in part]) if part else ()
                done, part = part[: len(rewards)], part[len(rewards) :]
                for (shared, _), reward in zip(done, rewards, strict=True):
                    shared.found.set_result(reward)
                self._together = min(MAX_LIST, 2 * max(1, len(done)))
                left.extendleft(reversed(part))
                part = []
        except BaseException as error:
            why = error if isinstance(error, Exception) else RetryableError("the ledger is stopping: send again")
            for shared, _ in [*part, *left]:
                shared.found.set_exception(why)
                shared.found.exception()  # read here: perhaps no other request waits
            left.clear()
            raise
