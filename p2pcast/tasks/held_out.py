"""Base of tasks that exclude a share of their problems from training, for evaluation.

A problem is held out by its content: by a hash of what identifies it, never by its place among the prompts. So every
machine divides the problems alike, and a larger share holds out the problems of a smaller one too. The share is part of
the task's hash: ledger, workers and learner agree on it, and workers play training and evaluation alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final

from p2pcast.ground.errors import UsageError
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Prompt
from p2pcast.tasks.task_hash import Settings

MAX_PERCENT: Final = 50
MOST_SKIPPED: Final = 20_000
"""Successive prompts of the other side. At a share of 1 % so many follow one another once in e^200 times, so no problem
of the wanted side exists.
"""


class HoldsOut(ABC):
    """A task without a share holds nothing out."""

    name: ClassVar[str]
    held_out_percent = 0

    @abstractmethod
    def prompts(self, *seed: int | str) -> Iterator[Prompt]:
        """Prompts without end, of held-out and other problems. Equal seeds give equal prompts."""

    @abstractmethod
    def problem(self, prompt: bytes) -> str:
        """The content that identifies the prompt's problem. Prompts of one problem are held out together."""

    def hold_out(self, percent: int) -> None:
        """For the task's constructor. ``percent``: of the problems, 0 to 50. Raises UsageError."""
        if not 0 <= percent <= MAX_PERCENT:
            raise UsageError(f"held_out={percent} of task {self.name}: give 0 to {MAX_PERCENT} percent of its problems")
        self.held_out_percent = percent

    @property
    def held_out_settings(self) -> Settings:
        """For the task's settings."""
        return {"held_out": self.held_out_percent} if self.held_out_percent else {}

    def held_out(self, prompt: bytes) -> bool:
        return draw_below(100, "held out", self.name, self.problem(prompt)) < self.held_out_percent

    def jobs(self, seed: int) -> Iterator[Prompt]:
        """Prompts that are not held out."""
        return self.chosen(self.prompts(seed), held_out=False)

    def evaluation_jobs(self, seed: int) -> Iterator[Prompt]:
        """Held-out prompts alone. Raises UsageError if the task holds nothing out."""
        if not self.held_out_percent:
            raise UsageError(f"task {self.name} holds no problems out for evaluation: add held_out=10 to its settings")
        return self.chosen(self.prompts(seed), held_out=True)

    def chosen(self, prompts: Iterator[Prompt], *, held_out: bool) -> Iterator[Prompt]:
        """The prompts of one side. Raises UsageError where one side has no problem."""
        skipped = 0
        for prompt in prompts:
            if self.held_out(prompt.prompt) == held_out:
                skipped = 0
                yield prompt
            elif (skipped := skipped + 1) == MOST_SKIPPED:
                side = "none" if held_out else "all"
                raise UsageError(
                    f"task {self.name} holds out {side} of its few problems: change held_out={self.held_out_percent}"
                )
