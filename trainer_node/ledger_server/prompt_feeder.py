"""Keeps groups in the ledger's pool, made from the task's own prompts.

Promises: prompts come in the task's order for the seed, each once, over restarts too: the cursor behind them is a row,
written with their groups. Groups that a trainer adds, and evaluations, move no cursor. Prompts whose way into the
database failed come first at the next attempt. A task without further prompts ends the feeding alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import blake3

from p2pcast.rollouts.job import Group
from p2pcast.tasks.task import Prompt, Task
from trainer_node.ledger.ledger_rows import MAX_LIST
from trainer_node.ledger.prompting import Passed, Position

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
    """``look``: the cursor in the database, and how many groups wait. ``add``: into the pool, with the cursor."""

    def __init__(
        self,
        task: Task,
        feed: Feed,
        look: Callable[[], Awaitable[Position]],
        add: Callable[[Passed], Awaitable[object]],
    ) -> None:
        self._task, self._feed, self._look, self._add = task, feed, look, add
        self._prompts: Iterator[Prompt] = iter(task.jobs(feed.seed))
        self._number = 0
        """Of the next prompt."""
        self._made: Passed | None = None
        """Perhaps not yet in the database."""
        self.ended = False
        """Whether the task has no further prompts."""

    async def fill(self) -> None:
        """Add groups until enough wait. Raises what ``look`` and ``add`` raise."""
        while not self.ended or self._made is not None:
            at = await self._look()
            missing = min(MAX_LIST, self._feed.waiting - at.waiting)
            if self._made is None:
                if missing <= 0:
                    return
                # A user's task may take long for a prompt.
                self._made = await asyncio.to_thread(self._make, at.cursor, missing)
            await self._add(self._made)
            self._made = None

    def _make(self, cursor: int, count: int) -> Passed:
        """Of the prompts from the cursor on."""
        groups: list[Group] = []
        try:
            while self._number < cursor:
                next(self._prompts)
                self._number += 1
            for _ in range(count):
                groups.append(group_of(self._task, self._feed, self._number, next(self._prompts)))
                self._number += 1
        except StopIteration:
            self.ended = True
            logger.warning(
                "task %s has no prompts after %d: only trainers add groups now", self._task.name, self._number
            )
        return Passed(cursor, cursor + len(groups), groups, self.ended)
