"""Keeps groups in the ledger's pool, made from the task's own prompts.

Promises: prompts come in the task's order for the seed, each once, over restarts too: the cursor behind them is a row,
written with their groups. Groups that a trainer adds, and evaluations, move no cursor. Prompts whose way into the
database failed come first at the next attempt. A task without further prompts ends the feeding alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import blake3

from p2pcast.errors import LocalError
from p2pcast.rollouts.job import Group
from p2pcast.tasks.task import Prompt, Task
from trainer_node.ledger.ledger_rows import MAX_LIST
from trainer_node.ledger.prompts.prompting import Passed, Position
from trainer_node.ledger_server.prompt_choice import HookedChoice, HookSource, every_prompt

logger = logging.getLogger("p2pcast.ledger")

CHECK_S = 0.25
"""Interval in seconds at which the feeder counts the waiting groups."""
MAX_SKIPPED = 10_000
"""Prompts that hooks may leave out one after the other, before the work counts as failing for a while."""
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


def group_of(task: Task, feed: Feed, number: int, prompt: Prompt, copy: int = 0) -> Group:
    """The group of the task's prompt of that number. Equal arguments give equal groups. ``copy``: of several groups of
    the prompt.
    """
    named = _LABEL + task.hash + feed.seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    if copy:
        named += copy.to_bytes(8, "little")
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
    """``look``: the cursor in the database, and how many groups wait. ``add``: into the pool, with the cursor.
    ``hooks``: choose among the prompts; without them each prompt is one group.
    """

    def __init__(
        self,
        task: Task,
        feed: Feed,
        look: Callable[[], Awaitable[Position]],
        add: Callable[[Passed], Awaitable[object]],
        hooks: HookSource | None = None,
    ) -> None:
        self._task, self._feed, self._look, self._add = task, feed, look, add
        self._hooks = None if hooks is None else hooks.name
        self._choice = None if hooks is None else HookedChoice(hooks, feed.seed)
        self._prompts: Iterator[Prompt] = iter(task.jobs(feed.seed))
        self._read: deque[Prompt] = deque()
        """Prompts from the cursor on that were read and not yet passed on."""
        self._number = 0
        """Of the next prompt to read."""
        self._exhausted = False
        self._made: Passed | None = None
        """Perhaps not yet in the database."""
        self._skipped = 0
        """Prompts without a group, since the last group."""

    @property
    def ended(self) -> bool:
        """Whether the task has no further prompts."""
        return self._exhausted and not self._read

    async def fill(self) -> None:
        """Add groups until enough wait. Raises what ``look`` and ``add`` raise, HooksFailedError, and LocalError after
        MAX_SKIPPED prompts without a group.
        """
        if self._choice is not None:
            self._choice.check()
        while not self.ended or self._made is not None:
            at = await self._look()
            missing = min(MAX_LIST, self._feed.waiting - at.waiting)
            if self._made is None:
                if missing <= 0:
                    return
                self._made = await self._pass(at.cursor, missing)
            await self._add(self._made)
            made, self._made = self._made, None
            self._skipped = 0 if made.groups else self._skipped + made.end - made.start
            if self._skipped >= MAX_SKIPPED:
                skipped, self._skipped = self._skipped, 0
                raise LocalError(f"--hooks {self._hooks}: the newest {skipped} prompts were all left out")

    async def close(self) -> None:
        if self._choice is not None:
            await self._choice.close()

    async def _pass(self, cursor: int, missing: int) -> Passed:
        # A user's task may take long for a prompt.
        await asyncio.to_thread(self._read_on, cursor, missing)
        prompts = list(self._read)
        if self._choice is None:
            chosen = every_prompt(cursor, prompts, self._group)
        else:
            chosen = await self._choice.choose(cursor, prompts, missing, self._group)
        for _ in range(chosen.prompts):
            self._read.popleft()
        if self.ended:
            logger.warning(
                "task %s has no prompts after %d: only trainers add groups now", self._task.name, self._number
            )
        return Passed(cursor, cursor + chosen.prompts, chosen.groups, self.ended, self._hooks, chosen.state)

    def _group(self, number: int, prompt: Prompt, copy: int) -> Group:
        return group_of(self._task, self._feed, number, prompt, copy)

    def _read_on(self, cursor: int, count: int) -> None:
        """Until ``count`` prompts from the cursor on are there."""
        try:
            while self._number < cursor:
                next(self._prompts)
                self._number += 1
            while len(self._read) < count:
                self._read.append(next(self._prompts))
                self._number += 1
        except StopIteration:
            self._exhausted = True
