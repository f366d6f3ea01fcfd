"""A task's prompts, read in a process that can be killed: ``jobs`` may hang, crash, raise, or give no prompt.

Promises: a prompt that takes longer than PROMPT_S ends the process with all that it started; so does an error. The next
look starts another process, which passes over the prompts that were read before. An error names the prompt, and what
was raised with its file and line. Anything but a prompt comes as a FaultyPrompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator
from itertools import islice
from typing import Any, NamedTuple

import msgpack

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.tasks.child_processes.killable_child import BROKEN, ChildDownError, KillableChild
from p2pcast.tasks.task import FaultyPrompt, Prompt, Task, prompt_fault

logger = logging.getLogger("p2pcast.tasks")

FIRST_S = 600.0
"""Time limit of the first prompt, in seconds: a data set may be read for it."""
PROMPT_S = 60.0
"""Time limit of each further prompt, in seconds."""
AT_ONCE = 32
"""Prompts that ``prompts_of`` asks for at a time."""


class PromptsFailedError(LocalError):
    """The task's ``jobs`` raised, hung, crashed, or gave no iterator."""


class FaultyPromptError(UsageError):
    """A prompt of which no group can be made."""


class ReadPrompts(NamedTuple):
    """``ended``: no further ones follow."""

    rows: list[Prompt | FaultyPrompt]
    ended: bool


class PromptReader:
    """``name``: of the task, as on the command line. ``held_out``: its prompts for evaluation. ``first_s``: limit of
    the first prompt; ``limit_s``: of each further one.
    """

    def __init__(
        self,
        name: str,
        task_hash: bytes,
        seed: int,
        *,
        held_out: bool = False,
        first_s: float = FIRST_S,
        limit_s: float = PROMPT_S,
    ) -> None:
        self._name, self._hash, self._seed, self._held_out = name, task_hash, seed, held_out
        self._first_s, self._limit_s = first_s, limit_s
        self._method = f"{'evaluation_jobs' if held_out else 'jobs'}({seed}) of task {name}"
        self._child: KillableChild | None = None
        self._begun = False
        """The process has given a prompt."""
        self._at = 0
        """The prompt that the process is asked for, or passes over."""
        self._careful_until = 0
        """Prompts before this number are asked for one by one: one of them failed."""
        self._asked_s: float | None = None
        """Since when, by the monotonic clock; None while nothing is asked for."""

    @property
    def waits_s(self) -> float:
        """Time for which the present prompt has not come, in seconds."""
        return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    @property
    def waits_for(self) -> str:
        """Names the present prompt."""
        return f"prompt {self._at} of {self._method}"

    async def read(self, first: int, count: int) -> ReadPrompts:
        """Prompts from number ``first`` on, at least one unless the task has no further ones. Raises UsageError for a
        task that refuses, and PromptsFailedError if the prompt ``first`` itself does not come.
        """
        most = 1 if first < self._careful_until else count
        try:
            return await self._read(first, most)
        except PromptsFailedError as error:
            if most == 1:
                raise
            logger.warning("%s; another process asks for one prompt at a time", error)
            self._careful_until = first + most
            return await self._read(first, 1)

    async def _read(self, first: int, count: int) -> ReadPrompts:
        try:
            self._at = first if self._begun else 0
            child = self._child or await self._started()
            child.send(msgpack.packb([self._seed, self._held_out, first, count]))
            while (found := await self._answer(child)) is None:
                pass
            return found
        except BaseException:
            await self.close()
            raise
        finally:
            self._asked_s = None

    async def close(self) -> None:
        """The process ends, whatever it does."""
        if self._child is not None:
            child, self._child, self._begun = self._child, None, False
            await child.kill()

    async def _started(self) -> KillableChild:
        module = "p2pcast.tasks.child_processes.prompt_child"
        try:
            self._child, _ = await KillableChild.of_task("prompts", module, self._name, self._hash)
        except ChildDownError as error:
            raise PromptsFailedError(str(error)) from None
        return self._child

    async def _answer(self, child: KillableChild) -> ReadPrompts | None:
        """None while earlier prompts are passed over."""
        limit_s = self._limit_s if self._begun else self._first_s
        self._asked_s = time.monotonic()
        try:
            async with asyncio.timeout(limit_s):
                what, found = await child.answer()
            self._begun = True
            if what == "at":
                self._at = int(found)
                return None
            if what in ("rows", "ended"):
                return ReadPrompts([prompt_of(row) for row in found], what == "ended")
        except TimeoutError:
            raise PromptsFailedError(
                f"{self.waits_for} has not come for {limit_s:g} s: its process was ended, and starts again"
            ) from None
        except (*BROKEN, TypeError) as error:
            raise PromptsFailedError(
                f"{self._method}: its process died or answered nonsense ({type(error).__name__})"
            ) from None
        if what == "refused":
            raise UsageError(str(found))
        raise PromptsFailedError(f"{self._method}: {found}")


def prompts_of(name: str, task: Task, seed: int, *, held_out: bool = False) -> Generator[Prompt]:
    """The prompts, for a program without an event loop. ``name``: as on the command line. Raises what ``read`` raises,
    and FaultyPromptError.
    """
    reader = PromptReader(name, task.hash, seed, held_out=held_out)
    with asyncio.Runner() as runner:
        number = 0
        try:
            ended = False
            while not ended:
                rows, ended = runner.run(reader.read(number, AT_ONCE))
                for row in rows:
                    if isinstance(row, FaultyPrompt):
                        raise FaultyPromptError(f"{row.name} of task {task.name}: {row.why}")
                    number += 1
                    yield row
        finally:
            runner.run(reader.close())


def first_prompts(name: str, task: Task, seed: int, count: int, *, held_out: bool = False) -> list[Prompt]:
    """At most ``count``, as ``prompts_of``."""
    with contextlib.closing(prompts_of(name, task, seed, held_out=held_out)) as prompts:
        return list(islice(prompts, count))


def prompt_of(row: Any) -> Prompt | FaultyPrompt:
    """Of a row of the child. Raises ValueError, TypeError."""
    sound, *found = row
    if not sound:
        name, why = found
        return FaultyPrompt(str(name), str(why))
    prompt = Prompt(*found)
    if prompt_fault(prompt) is not None:
        raise ValueError("not the child's words")
    return prompt
