"""Which groups make the next batch, and which can never be trained. Pure.

The oldest groups come first: freshest first would let the others age until they are stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from p2pcast.rollouts.overlong import Overlong, paid
from trainer_node.ledger.staleness_rule import StalenessBounds

OVERSAMPLE = 3
"""Groups played for a batch, as a multiple of its size, before it is cut with fewer groups."""
LEAST_SURVIVORS = 2
"""Accepted results of a group that can be trained: rewards are compared within the group."""


class GroupVerdict(Enum):
    USE = "use"
    WAIT = "wait"
    """Jobs of the group are still open."""
    EQUAL = "equal rewards"
    """Equal rewards have no advantages. The rewards compared are what the learner pays (``p2pcast.rollouts.overlong``).
    """
    SHORT = "too few results"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class CandidateGroup:
    """A group that is in no batch. ``opened``: its number in the order of opening. ``steps``: of each accepted result,
    the step of its oldest span. ``rewards``: in the same order. ``unsettled``: jobs that may still bring a result,
    and those whose reward is still replayed. ``cut_off``: whether each result ended at its limit of tokens; empty: no
    result did.
    """

    opened: int
    steps: Sequence[int]
    rewards: Sequence[float]
    unsettled: int = 0
    cut_off: Sequence[bool] = ()

    def fresh(self, oldest_step: int, overlong: Overlong) -> list[float]:
        """Return the rewards of the fresh results, as paid to the learner, which sees no others."""
        cut_off = self.cut_off or [False] * len(self.rewards)
        rows = [
            (reward, cut)
            for reward, cut, step in zip(self.rewards, cut_off, self.steps, strict=True)
            if step >= oldest_step
        ]
        return paid([reward for reward, _ in rows], [cut for _, cut in rows], overlong)


def judge(group: CandidateGroup, oldest_step: int, overlong: Overlong = "keep") -> GroupVerdict:
    """Return the verdict on a group if results from steps before ``oldest_step`` are stale. ``overlong``: how the
    learner treats truncated results.
    """
    if group.unsettled:
        return GroupVerdict.WAIT
    fresh = group.fresh(oldest_step, overlong)
    if len(fresh) < LEAST_SURVIVORS:
        return GroupVerdict.STALE if len(group.rewards) >= LEAST_SURVIVORS else GroupVerdict.SHORT
    return GroupVerdict.USE if min(fresh) != max(fresh) else GroupVerdict.EQUAL


def last_chance(group: CandidateGroup, oldest_step: int, overlong: Overlong = "keep") -> bool:
    """Whether a group with open jobs can be trained now but has results that will be stale one step later."""
    settled = replace(group, unsettled=0)
    return oldest_step in group.steps and judge(settled, oldest_step, overlong) is GroupVerdict.USE


@dataclass(frozen=True, slots=True)
class Cut:
    """``batch``: the groups of the next batch, None while it must wait. A group of the batch may have open jobs: they
    are cancelled. ``dropped``: groups that can never be trained, whatever happens, and why.
    """

    batch: tuple[CandidateGroup, ...] | None
    dropped: tuple[tuple[CandidateGroup, GroupVerdict], ...]


def cut(
    bounds: StalenessBounds,
    groups: Iterable[CandidateGroup],
    learner_step: int,
    played: int,
    overlong: Overlong = "keep",
) -> Cut:
    """Cut the batch of ``learner_step``. ``played``: groups that ended for this batch before, without being trained.
    ``overlong``: as of ``judge``.

    A batch waits for P whole groups. Then groups whose results would be stale one step later go before whole ones,
    without their open jobs: otherwise one straggler would waste all results of its group.
    """
    oldest_step = learner_step - bounds.staleness
    usable: list[CandidateGroup] = []
    urgent: list[CandidateGroup] = []
    dropped: list[tuple[CandidateGroup, GroupVerdict]] = []
    for group in sorted(groups, key=lambda g: (min(g.steps, default=0), g.opened)):
        verdict = judge(group, oldest_step, overlong)
        if verdict is GroupVerdict.USE:
            usable.append(group)
        elif verdict is not GroupVerdict.WAIT:
            dropped.append((group, verdict))
        elif last_chance(group, oldest_step, overlong):
            urgent.append(group)
    enough = len(usable) >= bounds.batch_groups
    exhausted = played + len(dropped) + len(usable) >= OVERSAMPLE * bounds.batch_groups and len(usable) > 0
    batch = tuple([*urgent, *usable][: bounds.batch_groups]) if enough or exhausted else None
    return Cut(batch, tuple(dropped))
