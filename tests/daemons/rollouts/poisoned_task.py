"""The parity task with every kind of bad row, prompt, play and reward."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from tests.daemons.rollouts.parity_task import Parity

NAME = "tests.daemons.rollouts.poisoned_task:Poisoned"
ALL = "tests.daemons.rollouts.poisoned_task:AllPoisoned"
SELDOM = "tests.daemons.rollouts.poisoned_task:SeldomPoisoned"
AWAY = "tests.daemons.rollouts.poisoned_task:Away"
HALF = "tests.daemons.rollouts.poisoned_task:HalfPoisoned"
MARKS = "P2PCAST_TASK_MARKS"
"""Folder where ``jobs`` marks what it has done once."""
ROWS = 8
GOOD, NO_TOKENS, NO_PROMPT, RAISES, LONG, NO_REWARD, NO_RESULT, NO_BYTES = range(ROWS)
"""Kinds of rows, by their numbers modulo ROWS."""
BLOCKS, ENDS, HUGE = range(ROWS, ROWS + 3)
"""Further kinds, of AllPoisoned: a play that blocks, one that ends its process, a reward above all bounds."""
KINDS = ROWS + 3
FAILS_AT, HANGS_AT = 10, 19
"""Rows at which ``jobs`` raises, and hangs, the first time."""
LONGEST = 16
"""Length of the model: a prompt of kind LONG is one token longer."""


class Poisoned(Parity):
    def jobs(self, seed: int) -> Iterator[Any]:
        for number, prompt in enumerate(super().jobs(seed)):
            if number == FAILS_AT and first_time("failed"):
                raise OSError("the data set is away")
            if number == HANGS_AT and first_time("hung"):
                time.sleep(600)
            yield row(number % ROWS, number, prompt)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        kind = job.prompt[0] - 3
        if kind == RAISES:
            raise KeyError("card")
        played = await super().play(sampler, job)
        if kind == NO_RESULT:
            return Trajectory(played.token_ids[:0], *([None] * 5))  # type: ignore[arg-type]
        return played

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        if job.prompt[0] - 3 == NO_REWARD:
            raise ZeroDivisionError("no reward")
        return super().reward(job, token_ids, mask)


class AllPoisoned(Poisoned):
    def jobs(self, seed: int) -> Iterator[Any]:
        for number, prompt in enumerate(super().jobs(seed)):
            yield prompt
            if number % ROWS == GOOD:
                for kind in (BLOCKS, ENDS, HUGE):
                    yield row(kind, number, prompt)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        match job.prompt[0] - 3:
            case 8:
                time.sleep(600)  # noqa: ASYNC251 - the fault
            case 9:
                os._exit(1)
        return await super().play(sampler, job)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return 1e308 if job.prompt[0] - 3 == HUGE else super().reward(job, token_ids, mask)


class SeldomPoisoned(AllPoisoned):
    """Each eighth row is bad, of all kinds in turn."""

    def jobs(self, seed: int) -> Iterator[Any]:
        kinds = itertools.cycle(range(GOOD + 1, KINDS))
        for number, prompt in enumerate(Parity.jobs(self, seed)):
            yield row(next(kinds) if number % 8 == 3 else GOOD, number, prompt)


class HalfPoisoned(Parity):
    """Each second prompt is one of which no group can be made."""

    def jobs(self, seed: int) -> Iterator[Prompt]:
        for number, prompt in enumerate(super().jobs(seed)):
            yield Prompt(prompt.prompt, 0, f"row {number}") if number % 2 else prompt


class Away(Parity):
    """Raises at the fourth prompt."""

    def jobs(self, seed: int) -> Iterator[Prompt]:
        for number, prompt in enumerate(super().jobs(seed)):
            if number == 3:
                raise OSError("the data set is away")
            yield prompt


def row(kind: int, number: int, prompt: Prompt) -> Any:
    match kind:
        case 1:
            return Prompt(prompt.prompt, 0, f"row {number}")
        case 2:
            return {"row": number}
        case 7:
            return Prompt("text", 8, f"row {number}")  # type: ignore[arg-type]
    length = LONGEST + 1 if kind == LONG else 2
    # Tokens of the task tell rows apart.
    return Prompt(bytes([kind + 3]) + prompt.prompt[:1] * (length - 1), 8, f"row {number}, kind {kind}")


def first_time(what: str) -> bool:
    mark = Path(os.environ[MARKS]) / what
    if mark.exists():
        return False
    mark.touch()
    return True
