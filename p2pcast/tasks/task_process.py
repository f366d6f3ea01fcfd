"""Rewards computed in processes that can be killed: a task's checks may hang, crash, or take all memory.

Promises: a check that hangs or crashes costs its own result only; its process is killed with all that it started, and
the next check gets a new one. No check holds its place for longer than the time limits. Short checks are asked for
together, since an exchange of messages takes longer than one of them. A process sees no secret of the environment.
Where a task states the reward of a failed check, a check that hangs or crashes gives that reward. No result is rejected
for a process that does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgpack
import numpy as np

from p2pcast.ground.errors import LocalError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result, reward_fault
from p2pcast.tasks.child_processes.killable_child import BROKEN, PROCESS_BYTES, START_S, ChildDownError, KillableChild
from p2pcast.tasks.task import ForgedPlayError

logger = logging.getLogger("p2pcast.tasks")

CHECK_S = 10.0
"""Default time limit of one check, in seconds."""


class CheckFailedError(LocalError):
    """The check of one result hung or crashed, or the task raised."""


Outcome = float | ForgedPlayError | CheckFailedError
"""The reward, or why there is none."""


class TaskProcesses:
    """At most ``processes`` checks at once; more wait for their turn."""

    def __init__(
        self,
        task: str,
        task_hash: bytes,
        *,
        processes: int = 1,
        check_s: float = CHECK_S,
        start_s: float = START_S,
        memory_bytes: int = PROCESS_BYTES,
    ) -> None:
        """``task``: its name. ``task_hash``: a process that finds another hash is refused."""
        self._task, self._hash = task, task_hash
        self._check_s, self._start_s = check_s, start_s
        self.places = processes
        self._memory_bytes = memory_bytes
        self._places = asyncio.Semaphore(processes)
        self._idle: list[_Checker] = []
        self._busy: set[_Checker] = set()
        self._closed = False
        self.failed = 0
        """Checks that hung or crashed."""
        self.fault = ""
        """Why the newest process did not start; empty if it did."""

    @property
    def check_s(self) -> float:
        return self._check_s

    async def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        """Raises ForgedPlayError for tokens that the task refuses, CheckFailedError, and ChildDownError."""
        [found] = await self._ask([_one(job, token_ids, mask, None)])
        if isinstance(found, Exception):
            raise found
        return found

    async def check(self, handed_in: Sequence[tuple[Job, Result]]) -> list[Outcome]:
        """Rewards of the first results, whose other fields have to be those of the task's own play: of at least one,
        and of as many as take ``TOGETHER_S``. ForgedPlayError also for another stop, other turns, or a loss mask that
        is not the task's. Raises ChildDownError.
        """
        return await self._ask([_one(job, result.token_ids, result.mask, _claims(result)) for job, result in handed_in])

    async def _ask(self, request: Sequence[list[Any]]) -> list[Outcome]:
        """Up to the first check that its process does not survive."""
        async with self._places, self._checker() as checker:
            checker.child.send(msgpack.packb(request))
            return await self._answers(checker, len(request))

    async def _answers(self, checker: _Checker, most: int) -> list[Outcome]:
        found: list[Outcome] = []
        while len(found) < most:
            try:
                async with asyncio.timeout(self._check_s):
                    what, said = await checker.child.answer()
            except TimeoutError:
                return [*found, checker.failed(f"the check took longer than {self._check_s:g} s")]
            except BROKEN as error:
                died = f"the check's process died or answered nonsense ({type(error).__name__})"
                return [*found, checker.failed(died)]
            if what == "later" and found:
                break
            found.append(checker.failed(str(said)) if what == "hung" else _outcome(what, said))
            if what not in ("reward", "forged", "failed", "hung"):
                return found
        checker.clean = True
        return found

    @contextlib.asynccontextmanager
    async def _checker(self) -> AsyncIterator[_Checker]:
        """An idle process, or a new one; killed afterwards unless it answered. Raises ChildDownError."""
        checker = await self._living() or await self._started()
        self._busy.add(checker)
        checker.clean = False
        try:
            yield checker
        finally:
            self._busy.discard(checker)
            if checker.clean:
                self._idle.append(checker)
            else:
                self.failed += 1
                await checker.child.kill()

    async def _living(self) -> _Checker | None:
        """An idle process that has not died while it was idle."""
        while self._idle:
            checker = self._idle.pop()
            if checker.child.alive:
                return checker
            await checker.child.kill()
        return None

    async def recover(self) -> None:
        """Start a process if the newest attempt failed. Raises ChildDownError."""
        if self.fault:
            async with self._places:
                self._idle.append(await self._started())

    async def _started(self) -> _Checker:
        """Raises ChildDownError."""
        try:
            checker = await self._start()
        except ChildDownError as error:
            if str(error) != self.fault:
                logger.error("%s", error)
            self.fault = str(error)
            raise
        self.fault = ""
        return checker

    async def _start(self) -> _Checker:
        words = (self._task, self._hash, str(self._memory_bytes))
        child, failed_reward = await KillableChild.of_task(
            "checks", "p2pcast.tasks.task_checker", *words, start_s=self._start_s
        )
        if self._closed:
            await child.kill()
            raise ChildDownError("checks have ended")
        return _Checker(child, failed_reward)

    async def close(self) -> None:
        self._closed = True
        for checker in [*self._idle, *self._busy]:
            await checker.child.kill()
        self._idle.clear()


class _Checker:
    """One process, and what it says of its task."""

    def __init__(self, child: KillableChild, failed_reward: float | None) -> None:
        self.child = child
        self.failed_reward = failed_reward
        """Reward of a check that hangs or crashes, as the task states it."""
        self.clean = True
        """The last request was answered."""

    def failed(self, why: str) -> Outcome:
        """Of a check that hung or crashed: the reward that the task states for it, if there is one."""
        if self.failed_reward is None:
            return CheckFailedError(why)
        logger.warning("%s; the task gives such a play a reward of %g", why, self.failed_reward)
        return self.failed_reward


def _one(job: Job, token_ids: np.ndarray, mask: np.ndarray, claims: list[Any] | None) -> list[Any]:
    return [job.to_bytes(), token_ids.astype("<u4").tobytes(), mask.astype("u1").tobytes(), claims]


def _claims(result: Result) -> list[Any]:
    turns, loss = (None if found is None else found.tobytes() for found in (result.turns, result.loss_mask))
    return [result.stop, turns, loss]


def _outcome(what: str, said: Any) -> Outcome:
    if what == "reward" and type(said) is float:
        return said if (wrong := reward_fault(said)) is None else CheckFailedError(wrong)
    return ForgedPlayError(str(said)) if what == "forged" else CheckFailedError(f"the task's check failed: {said}")
