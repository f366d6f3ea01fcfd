"""Heartbeats that arrive close together are one transition: a thousand workers send hundreds a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from p2pcast.ground.errors import LocalError
from p2pcast.ground.wakeup import Wakeup
from p2pcast.ledger_api.worker_api import HeldLease
from trainer_node.ledger.leasing import Beat, unknown_session

GATHER_S = 0.05
"""Time in seconds for which heartbeats are gathered."""
MOST_LEASES = 128
"""Leases of the heartbeats of one transition, beyond those of its first heartbeat: a request for leases may wait for
this transition.
"""
AT_ONCE = 8
"""Transitions at the same time: they share commits with results. Four renew the leases of 64 workers of 8 slots while
results that came before take a second, which is less than a thousand workers need.
"""


class HeartbeatBatch:
    """``beat``: the transition, with one answer for each heartbeat; None for an unknown session."""

    def __init__(self, beat: Callable[[Sequence[Beat]], Awaitable[list[list[HeldLease] | None]]]) -> None:
        self._beat = beat
        self._queued: list[tuple[Beat, asyncio.Future[list[HeldLease]]]] = []
        self._unanswered: set[asyncio.Future[list[HeldLease]]] = set()
        self._ended = False
        self._changed = Wakeup()

    async def ask(self, session: bytes, tokens: Mapping[bytes, int]) -> list[HeldLease]:
        """Raises UnknownIdError, what the transition raises, and LocalError if ``run`` ends first, or has ended."""
        if self._ended:
            raise _closing()
        answer: asyncio.Future[list[HeldLease]] = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._queued.append((Beat(session, tokens), answer))
        self._changed.notify()
        return await answer

    async def run(self) -> None:
        try:
            while True:
                while not self._queued:
                    await self._changed.wait()
                await asyncio.sleep(GATHER_S)
                while self._queued:
                    batches = [self._take() for _ in range(AT_ONCE)]
                    await asyncio.gather(*(self._settle(batch) for batch in batches if batch))
        finally:
            self._ended = True
            for answer in self._unanswered:
                if not answer.done():
                    answer.set_exception(_closing())

    def _take(self) -> list[tuple[Beat, asyncio.Future[list[HeldLease]]]]:
        taken: list[tuple[Beat, asyncio.Future[list[HeldLease]]]] = []
        leases = 0
        while self._queued and (not taken or leases + len(self._queued[0][0].tokens) <= MOST_LEASES):
            taken.append(self._queued.pop(0))
            leases += len(taken[-1][0].tokens)
        return taken

    async def _settle(self, taken: list[tuple[Beat, asyncio.Future[list[HeldLease]]]]) -> None:
        try:
            answers = await self._beat([beat for beat, _ in taken])
        except Exception as error:  # noqa: BLE001 - every caller learns of it
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), held in zip(taken, answers, strict=True):
            if future.done():
                continue  # the caller has gone
            if held is None:
                future.set_exception(unknown_session())
            else:
                future.set_result(held)


def _closing() -> LocalError:
    return LocalError("the ledger is closing: try again later")
