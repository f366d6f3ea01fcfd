"""Keeps groups in the ledger's pool, made from the task's own prompts.

Guarantees: prompts come in the task's order for the seed, each once, over restarts too: the cursor behind them is a
row, written with their groups. Groups that a trainer adds, and evaluations, move no cursor. Prompts whose way into the
database failed come first at the next attempt. A prompt of which no group can be made is left out by name. A task
without further prompts ends the feeding alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import blake3

from p2pcast.ground.errors import LocalError, P2PCastError
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.rollouts.job import Group
from p2pcast.tasks.child_processes.prompt_reader import ReadPrompts
from p2pcast.tasks.task import FaultyPrompt, Prompt, Task, prompt_name
from trainer_node.ledger.prompts.prompting import PassedPrompts, PromptPosition
from trainer_node.ledger_server.prompt_choice import HookedChoice, HookSource, every_prompt

logger = logging.getLogger("p2pcast.ledger")

K = TypeVar("K")

CHECK_S = 0.25
"""Interval in seconds at which the feeder counts the waiting groups."""
MAX_SKIPPED = 10_000
"""Prompts that may give no group one after the other, before the work counts as failing for a while."""
NAMED_AT_ONCE = 4
"""Faulty prompts that one line of the log names."""
NEWEST_REJECTED = 8
"""Faulty prompts that /status names."""
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


class PromptSource(Protocol):
    """Of one task and seed."""

    async def read(self, first: int, count: int) -> ReadPrompts:
        """Prompts from number ``first`` on, at least one unless there are no further ones. Raises P2PCastError."""

    async def close(self) -> None: ...


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
    """``prompts``: of the task, for the feed's seed. ``look``: the cursor in the database, and how many groups wait.
    ``add``: into the pool, with the cursor. ``hooks``: choose among the prompts; without them each prompt is one group.
    ``left_out``: told of the faulty prompts behind which the cursor has moved. Raises UsageError for a task or feed
    that no group can be made with.
    """

    def __init__(
        self,
        task: Task,
        feed: Feed,
        prompts: PromptSource,
        look: Callable[[], Awaitable[PromptPosition]],
        add: Callable[[PassedPrompts], Awaitable[object]],
        hooks: HookSource | None = None,
        left_out: Callable[[Sequence[FaultyPrompt]], object] = lambda faulty: None,
    ) -> None:
        group_of(task, feed, 0, Prompt(b"", 1)).check()
        self._task, self._feed, self._look, self._add, self._left_out = task, feed, look, add, left_out
        self._hooks = None if hooks is None else hooks.name
        self._choice = None if hooks is None else HookedChoice(hooks, feed.seed)
        self._prompts = prompts
        self._read: deque[Prompt | FaultyPrompt] = deque()
        """Prompts from the cursor on that were read and not yet passed on."""
        self._number = 0
        """Of the next prompt to read."""
        self._exhausted = False
        self._made: tuple[PassedPrompts, list[FaultyPrompt]] | None = None
        """Perhaps not yet in the database."""
        self.rejected = 0
        """Faulty prompts since the start."""
        self.newest_rejected: deque[FaultyPrompt] = deque(maxlen=NEWEST_REJECTED)
        self._skipped = self._faulty = 0
        """Prompts without a group since the last group, and those of them that are faulty."""

    @property
    def ended(self) -> bool:
        """Whether the task has no further prompts."""
        return self._exhausted and not self._read

    async def fill(self) -> None:
        """Add groups until enough wait. Raises what ``prompts``, ``look`` and ``add`` raise, HooksFailedError, and
        LocalError after MAX_SKIPPED prompts without a group.
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
            made, faulty = self._made
            await self._add(made)
            self._made = None
            if faulty:
                self._tell(faulty)
            self._count_skipped(0 if made.groups else made.end - made.start, faulty)

    async def close(self) -> None:
        await self._prompts.close()
        if self._choice is not None:
            await self._choice.close()

    def _tell(self, faulty: Sequence[FaultyPrompt]) -> None:
        self.rejected += len(faulty)
        self.newest_rejected.extend(faulty)
        named = "; ".join(f"{one.name}: {one.why}" for one in faulty[:NAMED_AT_ONCE])
        more = f"; and {len(faulty) - NAMED_AT_ONCE} more" if len(faulty) > NAMED_AT_ONCE else ""
        logger.warning("task %s gives prompts of which no group can be made: %s%s", self._task.name, named, more)
        self._left_out(faulty)

    def _count_skipped(self, skipped: int, faulty: Sequence[FaultyPrompt]) -> None:
        """``skipped``: prompts that gave no group; 0 if there was one. Raises LocalError after MAX_SKIPPED."""
        self._skipped = self._skipped + skipped if skipped else 0
        self._faulty = self._faulty + len(faulty) if skipped else 0
        if self._skipped < MAX_SKIPPED:
            return
        by_hooks = f"{self._skipped - self._faulty} left out by --hooks {self._hooks}" if self._hooks else ""
        last = f"{self._faulty} faulty, the last one {faulty[-1].name}: {faulty[-1].why}" if faulty else ""
        why = ", ".join(part for part in (by_hooks, last) if part)
        skipped, self._skipped, self._faulty = self._skipped, 0, 0
        raise LocalError(f"the newest {skipped} prompts gave no group ({why})")

    async def _pass(self, cursor: int, missing: int) -> tuple[PassedPrompts, list[FaultyPrompt]]:
        await self._read_on(cursor, missing)
        faulty = _leading(FaultyPrompt, self._read)
        first = cursor + len(faulty)
        prompts = _leading(Prompt, islice(self._read, len(faulty), None))
        sources: dict[bytes, str] = {}

        def make(number: int, prompt: Prompt, copy: int) -> Group:
            group = group_of(self._task, self._feed, number, prompt, copy)
            sources[group.id] = f"{prompt_name(number, prompt)} of seed {self._feed.seed}"
            return group

        if self._choice is None or not prompts:
            chosen = every_prompt(first, prompts, make)
        else:
            chosen = await self._choice.choose(first, prompts, missing, make)
        for _ in range(len(faulty) + chosen.prompts):
            self._read.popleft()
        if self.ended:
            logger.warning(
                "task %s has no prompts after %d: only trainers add groups now", self._task.name, self._number
            )
        passed = PassedPrompts(
            cursor,
            first + chosen.prompts,
            chosen.groups,
            self.ended,
            self._hooks,
            chosen.state,
            {group.id: sources[group.id] for group in chosen.groups},
        )
        return passed, faulty

    async def _read_on(self, cursor: int, count: int) -> None:
        """Until ``count`` prompts from the cursor on are there, or those before one that does not come."""
        self._number = max(self._number, cursor)
        while len(self._read) < count and not self._exhausted:
            try:
                rows, self._exhausted = await self._prompts.read(self._number, count - len(self._read))
            except P2PCastError:
                if not self._read:
                    raise
                return
            self._read.extend(rows)
            self._number += len(rows)


def _leading(kind: type[K], read: Iterable[object]) -> list[K]:
    """The first ones, as far as they are of the kind."""
    found: list[K] = []
    for one in read:
        if not isinstance(one, kind):
            break
        found.append(one)
    return found
