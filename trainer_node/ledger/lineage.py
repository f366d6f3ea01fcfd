"""Which versions of the weights are live: those that the learner's present weights descend from. Pure.

A learner that resumes from an older checkpoint trains on under a new branch. Versions of the old branch up to the fork
stay ancestors of the new one. Later versions of the old branch are dead: rollouts made with them are not admissible at
any staleness.

A learner that begins without a checkpoint begins a lineage of its own. A warm start or another folder may have given it
other weights than those of the old branch after 0 steps.

A learner that crashed comes back with the newest checkpoint that it acknowledged, or a later one. One that begins below
goes back, and ``least_step`` bounds how far: the rows of earlier batches are deleted, so their prompts would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version

KEPT_BATCHES: Final = 16
"""Trained batches whose rows and bodies stay: a learner may resume from a checkpoint so many batches old."""


def least_step(step: int, acknowledged: int, *, checkpoint: bool) -> int:
    """The least step at which a learner begins without undoing the run: the ledger is at ``step``, and acknowledged
    checkpoints contain the batches before ``acknowledged``. ``checkpoint``: whether the learner has one.
    """
    return min(acknowledged, max(0, step - KEPT_BATCHES)) if checkpoint else acknowledged


class Fork(NamedTuple):
    """A branch begins with the weights of ``parent`` after ``step`` steps."""

    parent: int
    step: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """``branch``: the live branch. ``forks``: where each branch began that continues another one."""

    branch: int
    forks: Mapping[int, Fork]

    def _spans(self) -> Iterator[tuple[int, int, float]]:
        """Each branch on the way back from the live one, with its first and its last live step."""
        branch, last = self.branch, math.inf
        while (fork := self.forks.get(branch)) is not None:
            yield branch, fork.step, last
            branch, last = fork.parent, min(last, fork.step)
        yield branch, 0, last

    def is_live(self, version: Version) -> bool:
        """Whether the learner's weights descend from this version, or will be published as it."""
        return any(version.branch == b and first <= version.step <= last for b, first, last in self._spans())

    def forked(self, branch: int, step: int) -> Lineage:
        """The lineage of a learner that resumes on ``branch`` from the live version of ``step``. Raises UsageError
        unless the branch is newer than all others.
        """
        self._check_newer(branch)
        return Lineage(branch, {**self.forks, branch: Fork(self.branch, step)})

    def begun(self, branch: int) -> Lineage:
        """Return a from-scratch lineage on ``branch``. Raises UsageError unless it is the newest branch."""
        self._check_newer(branch)
        return Lineage(branch, self.forks)

    def _check_newer(self, branch: int) -> None:
        if branch <= (newest := max(self.branch, *self.forks, 0)):
            raise UsageError(f"branch {branch} is not newer than branch {newest}")
