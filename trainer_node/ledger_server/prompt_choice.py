"""Which groups are made of a task's prompts: one of each, or what a user's hooks choose.

Promises: hooks run in a thread that no other work waits for, for HOOK_S seconds at most. Hooks that raise, hang, or
answer nonsense end the choice with an error that names them. Their values are texts, to be written with the cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import blake3

from p2pcast import limits
from p2pcast.errors import LocalError
from p2pcast.rollouts.job import Group
from p2pcast.tasks.prompt_hooks import MAX_WEIGHT, PromptHooks
from p2pcast.tasks.task import Prompt
from trainer_node.ledger.ledger_rows import MAX_LIST

T = TypeVar("T")

HOOK_S = 30.0
"""Time limit in seconds of the hooks' calls for at most MAX_LIST prompts."""
MAX_STATE_VALUES = 1024
MAX_STATE_NAME = 128
"""Characters."""
MAX_STATE_BYTES = limits.MIB
"""Of all values together, as JSON."""
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
    made: type[PromptHooks]
    state: Callable[[], Awaitable[Mapping[str, str]]]
    histories: Callable[[Sequence[bytes]], Awaitable[Sequence[Sequence[float]]]]
    limit_s: float = HOOK_S


class HookedChoice:
    """``seed``: of draws. A choice after a failure raises the same failure: the hooks may be in any state."""

    def __init__(self, source: HookSource, seed: int) -> None:
        self._source, self._seed = source, seed
        self._hooks: PromptHooks | None = None
        self._state: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        """Of the state, as the database has it or will have it."""
        self._failed: HooksFailedError | None = None

    def check(self) -> None:
        """Raises the failure of an earlier choice."""
        if self._failed is not None:
            raise self._failed

    async def choose(self, first: int, prompts: Sequence[Prompt], most: int, make: MakeGroup) -> Chosen:
        """Of the prompts from number ``first`` on, until there are ``most`` groups. Raises HooksFailedError, and what
        ``state`` and ``histories`` raise.
        """
        self.check()
        if self._hooks is None:
            self._texts = dict(await self._source.state())
            self._state = {name: json.loads(text) for name, text in self._texts.items()}
        histories = await self._source.histories([prompt.prompt for prompt in prompts])
        try:
            chosen = await _in_thread(lambda: self._choose(first, prompts, histories, most, make), self._source.limit_s)
        except HooksFailedError as error:
            self._failed = HooksFailedError(
                f"--hooks {self._source.name}: {error}; no further prompts are added: correct the hooks and start the"
                f" ledger again, which continues at prompt {first}"
            )
            raise self._failed from error
        for name, text in chosen.state.items():
            if text is None:
                del self._texts[name]
            else:
                self._texts[name] = text
        return chosen

    def _choose(
        self,
        first: int,
        prompts: Sequence[Prompt],
        histories: Sequence[Sequence[float]],
        most: int,
        make: MakeGroup,
    ) -> Chosen:
        if self._hooks is None:
            self._hooks = self._source.made(self._state)
        groups: list[Group] = []
        decided = 0
        for prompt, history in zip(prompts, histories, strict=True):
            if len(groups) >= most or len(groups) + MAX_WEIGHT > MAX_LIST:
                break
            copies = self._copies(first + decided, self._hooks.weight(prompt, history))
            made = [make(first + decided, prompt, copy) for copy in range(copies)]
            groups += [group for group in made if self._hooks.filter(group)]
            decided += 1
        return Chosen(decided, groups, self._changes())

    def _copies(self, number: int, weight: float) -> int:
        weight = float(weight)
        if not 0 <= weight <= MAX_WEIGHT:
            raise HooksFailedError(f"the weight of prompt {number} is {weight}, not 0 to {MAX_WEIGHT:g}")
        named = _LABEL + self._seed.to_bytes(8, "little") + number.to_bytes(8, "little")
        drawn = int.from_bytes(blake3.blake3(named).digest(8), "little") / (1 << 64)
        return math.floor(weight) + (drawn < weight % 1)

    def _changes(self) -> dict[str, str | None]:
        for name in self._state:
            if type(name) is not str or not 1 <= len(name) <= MAX_STATE_NAME:
                raise HooksFailedError(f"a value's name has 1 to {MAX_STATE_NAME} characters, not {name!r:.80}")
        texts = {name: json.dumps(value, allow_nan=False) for name, value in self._state.items()}
        if len(texts) > MAX_STATE_VALUES or sum(map(len, texts.values())) > MAX_STATE_BYTES:
            raise HooksFailedError(f"the state has more than {MAX_STATE_VALUES} values or {MAX_STATE_BYTES} bytes")
        changes: dict[str, str | None] = dict.fromkeys(self._texts.keys() - texts.keys())
        return changes | {name: text for name, text in texts.items() if self._texts.get(name) != text}


async def _in_thread(work: Callable[[], T], limit_s: float) -> T:
    """Raises HooksFailedError. The thread is a daemon: one that hangs does not hold the process up at its end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def settle(found: T | None, error: HooksFailedError | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        found, failed = None, None
        try:
            found = work()
        except HooksFailedError as error:
            failed = error
        except BaseException as error:  # noqa: BLE001 - whatever a user's hooks raise
            failed = HooksFailedError(f"{type(error).__name__}: {error}"[:300])
        # The loop may have ended before the hooks.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, found, failed)

    threading.Thread(target=run, name="p2pcast-hooks", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await ended
    except TimeoutError:
        raise HooksFailedError(f"no answer within {limit_s:g} s") from None
