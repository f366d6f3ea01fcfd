"""Which groups are made of a task's prompts: one of each, or what a user's hooks choose.

Guarantees: hooks run in a process of their own, for HOOK_S seconds at most; a process that hangs is killed. Hooks that
raise, hang, crash, or answer nonsense end the choice with an error that names them. Their values are texts, to be
written with the cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import blake3
import msgpack

from p2pcast.ground.errors import LocalError
from p2pcast.ledger_api.api_route import MAX_LIST
from p2pcast.rollouts.job import Group
from p2pcast.tasks.child_processes.killable_child import BROKEN, PROCESS_BYTES, START_S, KillableChild
from p2pcast.tasks.prompt_hooks import MAX_WEIGHT
from p2pcast.tasks.task import Prompt

HOOK_S = 30.0
"""Time limit in seconds of the hooks' calls for at most MAX_LIST prompts."""
_LABEL = b"p2pcast prompt draw 1\0"


class HooksFailedError(LocalError):
    """Hooks raised, hung, or answered what no hook may answer."""


class Chosen(NamedTuple):
    """``prompts``: how many of the given ones were decided. ``state``: texts of the values that changed, None for those
    that were deleted.
    """

    prompts: int
    groups: list[Group]
    state: Mapping[str, str | None]


MakeGroup = Callable[[int, Prompt, int], Group]
"""Of a prompt's number, the prompt, and the copy, from 0 on."""


def every_prompt(first: int, prompts: Sequence[Prompt], make: MakeGroup) -> Chosen:
    return Chosen(len(prompts), [make(first + place, prompt, 0) for place, prompt in enumerate(prompts)], {})


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSource:
    """``name``: as on the command line. ``state``: reads the values' texts. ``histories``: of some prompts."""

    name: str
    state: Callable[[], Awaitable[Mapping[str, str]]]
    histories: Callable[[Sequence[bytes]], Awaitable[Sequence[Sequence[float]]]]
    limit_s: float = HOOK_S
    memory_bytes: int = PROCESS_BYTES


class HookedChoice:
    """``seed``: of draws. A choice after a failure raises the same failure: the hooks may be in any state."""

    def __init__(self, source: HookSource, seed: int) -> None:
        self._source, self._seed = source, seed
        self._child: KillableChild | None = None
        """The hooks with their state; None before the first choice, and after a failure."""
        self._texts: dict[str, str] = {}
        """Of the state, as the database has it or will have it."""
        self._failed: HooksFailedError | None = None

    def check(self) -> None:
        """Raises the failure of an earlier choice."""
        if self._failed is not None:
            raise self._failed

    async def choose(self, first: int, prompts: Sequence[Prompt], most: int, make: MakeGroup) -> Chosen:
        """Of the prompts from number ``first`` on, until there are ``most`` groups. Raises HooksFailedError, LocalError
        where no process can be made, and what ``state`` and ``histories`` raise.
        """
        self.check()
        histories = await self._source.histories([prompt.prompt for prompt in prompts])
        try:
            child = self._child or await self._started()
            async with self._limited(self._source.limit_s):
                chosen = await self._choose(child, first, prompts, histories, most, make)
        except HooksFailedError as error:
            self._failed = HooksFailedError(
                f"--hooks {self._source.name}: {error}; no further prompts are added: correct the hooks and start the"
                f" ledger again, which continues at prompt {first}"
            )
            await self.close()
            raise self._failed from error
        for name, text in chosen.state.items():
            if text is None:
                del self._texts[name]
            else:
                self._texts[name] = text
        return chosen

    async def close(self) -> None:
        """The hooks end, whatever they do."""
        if self._child is not None:
            await self._child.kill()
            self._child = None

    async def _started(self) -> KillableChild:
        """The hooks' process, with the values of the database."""
        self._texts = dict(await self._source.state())
        words = (self._source.name, str(self._source.memory_bytes))
        try:
            self._child = await KillableChild.start("p2pcast.tasks.child_processes.hook_child", *words)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise LocalError(f"no process for --hooks can be made ({why}): free memory or processes") from None
        async with self._limited(START_S):
            _expect("ready", await self._child.answer())
        async with self._limited(self._source.limit_s):
            await _ask(self._child, "begin", self._texts, "begun")
        return self._child

    @contextlib.asynccontextmanager
    async def _limited(self, limit_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise HooksFailedError(f"no answer within {limit_s:g} s") from None
        except BROKEN as error:
            raise HooksFailedError(f"their process died or answered nonsense ({type(error).__name__})") from None

    async def _choose(
        self,
        child: KillableChild,
        first: int,
        prompts: Sequence[Prompt],
        histories: Sequence[Sequence[float]],
        most: int,
        make: MakeGroup,
    ) -> Chosen:
        groups: list[Group] = []
        decided = 0
        for prompt, history in zip(prompts, histories, strict=True):
            if len(groups) >= most or len(groups) + MAX_WEIGHT > MAX_LIST:
                break
            number = first + decided
            words = [prompt.prompt, prompt.max_tokens, list(history)]
            copies = self._copies(number, float(await _ask(child, "weight", words, "weight")))
            made = [make(number, prompt, copy) for copy in range(copies)]
            groups += [group for group in made if await _ask(child, "filter", group.to_bytes(), "kept")]
            decided += 1
        return Chosen(decided, groups, self._changes(await _ask(child, "state", None, "state")))

    def _copies(self, number: int, weight: float) -> int:
        if not 0 <= weight <= MAX_WEIGHT:
            raise HooksFailedError(f"the weight of prompt {number} is {weight}, not 0 to {MAX_WEIGHT:g}")
        named = _LABEL + self._seed.to_bytes(8, "little") + number.to_bytes(8, "little")
        drawn = int.from_bytes(blake3.blake3(named).digest(8), "little") / (1 << 64)
        return math.floor(weight) + (drawn < weight % 1)

    def _changes(self, texts: dict[str, str]) -> dict[str, str | None]:
        changes: dict[str, str | None] = dict.fromkeys(self._texts.keys() - texts.keys())
        return changes | {name: text for name, text in texts.items() if self._texts.get(name) != text}


async def _ask(child: KillableChild, what: str, words: Any, wanted: str) -> Any:
    """Raises HooksFailedError, and BROKEN."""
    return _expect(wanted, await child.ask(msgpack.packb([what, words])))


def _expect(wanted: str, answer: tuple[str, Any]) -> Any:
    what, found = answer
    if what == wanted:
        return found
    raise HooksFailedError(str(found) if what == "failed" else "their process answered nonsense (another answer)")
