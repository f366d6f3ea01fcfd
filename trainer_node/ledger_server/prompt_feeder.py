"""Keeps groups in the ledger's pool, made from the task's own prompts.

Promises:

- Prompts come in the task's order for the seed, each once, over restarts too, whatever groups trainers add.
- A group whose way into the database failed comes first at the next attempt.
- A task without further prompts ends the feeding alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import blake3

from p2pcast.rollouts.job import Group
from p2pcast.tasks.task import Prompt, Task
from trainer_node.ledger.ledger_rows import MAX_LIST

logger = logging.getLogger("p2pcast.ledger")

LOOK_S = 0.25
"""Interval in seconds at which the feeder counts the waiting groups."""
_LABEL = b"p2pcast prompt 1\0"


@dataclass(frozen=True, slots=True)
class Feed:
    """``seed``: of the task's prompts. ``group_size``: samples of each prompt. ``waiting``: groups to keep in the
    pool.
    """

    seed: int
    group_size: int
    temperature: float
    waiting: int


def group_of(task: Task, feed: Feed, number: int, prompt: Prompt) -> Group:
    """The group of the task's prompt of that number. Equal arguments give equal groups."""
    named = _LABEL + task.hash + feed.seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    drawn = blake3.blake3(named).digest(24)
    return Group(
        id=drawn[:16],
        size=feed.group_size,
        purpose="train",
        task=task.name,
        task_hash=task.hash,
        prompt=prompt.prompt,
        seed=int.from_bytes(drawn[16:], "little"),
        temperature=feed.temperature,
        max_tokens=prompt.max_tokens,
        stop_token_ids=tuple(task.stop_token_ids),
    )


class PromptFeeder:
    """``pool``: how many groups were ever made from the task's prompts, and how many to train wait. ``add``: into the
    pool."""

    def __init__(
        self,
        task: Task,
        feed: Feed,
        pool: Callable[[], Awaitable[tuple[int, int]]],
        add: Callable[[Sequence[Group]], Awaitable[object]],
    ) -> None:
        self._task, self._feed, self._pool, self._add = task, feed, pool, add
        self._prompts: Iterator[Prompt] = iter(task.jobs(feed.seed))
        self._number = 0
        """Of the next prompt."""
        self._made: list[Group] = []
        """Not yet in the pool."""
        self.ended = False
        """Whether the task has no further prompts."""

    async def fill(self) -> None:
        """Add groups until enough wait. Raises what ``pool`` and ``add`` raise."""
        while not self.ended or self._made:
            added, waiting = await self._pool()
            missing = min(MAX_LIST, self._feed.waiting - waiting)
            if missing <= 0:
                return
            if not self._made:
                # A user's task may take long for a prompt.
                await asyncio.to_thread(self._make, added, missing)
            if self._made:
                await self._add(self._made)
                self._made = []

    def _make(self, added: int, count: int) -> None:
        try:
            while self._number < added:
                next(self._prompts)
                self._number += 1
            for _ in range(count):
                self._made.append(group_of(self._task, self._feed, self._number, next(self._prompts)))
                self._number += 1
        except StopIteration:
            self.ended = True
            logger.warning(
                "task %s has no prompts after %d: only trainers add groups now", self._task.name, self._number
            )
