"""Trusted rewards, computed again by the ledger for a random share of the results.

Guarantees: replays run in the processes of checks, with their limits, and in turns of the parties that answer for the
results. A replay that hangs or crashes ends its own result alone. The database has the due replays: a restart goes on.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from p2pcast.ground.errors import IntegrityError
from p2pcast.process.events import Events
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result
from p2pcast.tasks.task import FAILED_CHECK_TAG, ForgedPlayError
from p2pcast.tasks.task_process import CheckFailedError, Outcome, TaskProcesses
from trainer_node.ledger.acceptance import Reason, Rejection
from trainer_node.ledger.audits.replaying import DISAGREES, Due
from trainer_node.ledger.ledger import Ledger

REPLAY_S = 0.25
"""Interval in seconds at which the ledger looks for replays that are due."""


async def checked_rewards(scorers: TaskProcesses, handed_in: Sequence[tuple[Job, Result]]) -> list[float | Rejection]:
    """The ledger's own figures of the first results, or why there are none. Raises ChildDownError."""
    return [_of(outcome) for outcome in await scorers.check(handed_in)]


def _of(outcome: Outcome) -> float | Rejection:
    if isinstance(outcome, ForgedPlayError):
        return Rejection(Reason.FORGED, str(outcome))
    return Rejection(Reason.UNSCORED, str(outcome)) if isinstance(outcome, CheckFailedError) else outcome


async def stated_rewards(handed_in: Sequence[tuple[Job, Result]]) -> list[float | Rejection]:
    """The workers' figures, for a run that trusts them."""
    return [stated_reward(result) for _, result in handed_in]


def stated_reward(result: Result) -> float | Rejection:
    for name, why in result.tags or ():
        if name == FAILED_CHECK_TAG:
            return Rejection(Reason.UNSCORED, f"the worker's check failed: {why}")
    return result.reward


class RewardReplays:
    """``call``: one transition, outside the event loop. ``changed``: jobs may have opened again."""

    def __init__(
        self,
        ledger: Ledger,
        scorers: TaskProcesses,
        call: Callable[..., Awaitable[Any]],
        changed: Callable[[], object],
        events: Events,
    ) -> None:
        self._ledger, self._scorers, self._call, self._changed, self._events = ledger, scorers, call, changed, events

    async def replay(self) -> None:
        """All that is due. Raises ChildDownError, and what the database raises."""
        while due := await self._call(self._ledger.due_replays, self._scorers.places):
            # All of them end here: a failure of one must not leave others running.
            ended = await asyncio.gather(*map(self._replay, due), return_exceptions=True)
            for one in ended:
                if isinstance(one, BaseException):
                    raise one

    async def _replay(self, one: Due) -> None:
        stated: float | None = None
        found: float | Rejection
        try:
            read = await self._call(self._ledger.replay, one)
        except IntegrityError as error:
            found = Rejection(Reason.DAMAGED, str(error))
        else:
            if read is None:
                return
            job, result = read
            stated, [found] = result.reward, await checked_rewards(self._scorers, [(job, result)])
        ended = await self._call(functools.partial(self._ledger.replayed, one, found))
        if ended is None or not ended.rejected:
            return
        self._changed()
        if ended.found == DISAGREES:
            why = found.detail if isinstance(found, Rejection) else f"the task's reward is {found}"
            self._events.emit(
                "reward_disagrees",
                worker=ended.worker, job=one.job.hex(), stated=stated, why=why, rejected=ended.rejected,
            )  # fmt: skip
