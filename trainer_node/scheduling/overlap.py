"""The overlap condition: the rollout capacity that keeps a learner busy, and the resulting staleness. Pure.

Source: ECHO-2, sections 3.3 and 3.4 and appendix B; each function gives the number of its equation. One addition:
``trained_share``, the share of rollouts that reach a batch. The paper counts every rollout (1.0). Groups with equal
rewards, and stale or rejected results, lower the share, and the capacity has to compensate for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from p2pcast.ground.errors import UsageError

CAPACITY_MARGIN = 1.1
"""γ of ECHO-2, section 4.3: capacity relative to the minimum, which absorbs the loss of one worker in ten."""


@dataclass(frozen=True, slots=True)
class RolloutPace:
    """``train_s``: seconds per learner step. ``broadcast_s``: seconds from a publication until the share 1/γ of the
    engines serves it. ``rollouts``: rollouts per step. ``steps``: κ, learner steps between publications.
    ``trained_share``: the share of all rollouts that reach a batch.
    """

    train_s: float
    broadcast_s: float
    rollouts: int
    steps: int = 1
    trained_share: float = 1.0

    def __post_init__(self) -> None:
        if not (self.train_s > 0 and math.isfinite(self.train_s)):
            raise UsageError(f"the time of a learner step must be above 0 s, not {self.train_s}")
        if not (self.broadcast_s >= 0 and math.isfinite(self.broadcast_s)):
            raise UsageError(f"the time of a broadcast must be at least 0 s, not {self.broadcast_s}")
        if self.rollouts < 1 or self.steps < 1:
            raise UsageError("rollouts of a step, and steps between publications, must be at least 1")
        if not 0 < self.trained_share <= 1:
            raise UsageError(f"the share of rollouts that are trained must be in (0, 1], not {self.trained_share}")

    @property
    def needed_rollouts(self) -> float:
        """Rollouts to be made between two publications, including those that are never trained."""
        return self.steps * self.rollouts / self.trained_share

    @property
    def spare_s(self) -> float:
        """Seconds of a publication period in which all engines serve the newest version. If this is not above 0, no
        capacity suffices.
        """
        return self.steps * self.train_s - self.broadcast_s


def overlaps(pace: RolloutPace, rollouts_per_s: float) -> bool:
    """Whether the learner never waits (equation 1). ``rollouts_per_s``: rate of all workers together."""
    return rollouts_per_s > 0 and pace.spare_s >= pace.needed_rollouts / rollouts_per_s


def least_rollouts_per_s(pace: RolloutPace) -> float:
    """μ_min (equation 2): the lowest capacity at which the learner never waits. Raises UsageError if there is none."""
    if pace.spare_s <= 0:
        raise UsageError(
            f"no number of workers keeps the learner busy: a broadcast takes {pace.broadcast_s:g} s, and a version is "
            f"published every {pace.steps} steps of {pace.train_s:g} s. Publish less often, or make broadcasts faster"
        )
    return pace.needed_rollouts / pace.spare_s


def rollouts_from_newest(pace: RolloutPace, rollouts_per_s: float, steps: int) -> float:
    """G(n) (equation 5): the most rollouts made with a version within ``steps`` learner steps of its publication."""
    return rollouts_per_s * max(0.0, steps * pace.train_s - pace.broadcast_s)


def worst_staleness(pace: RolloutPace, rollouts_per_s: float) -> int:
    """Δ_max in learner steps (equation 7), if engines sample nothing with a version before its broadcast is over."""
    wait_s = pace.broadcast_s + pace.rollouts / pace.trained_share / rollouts_per_s
    return pace.steps + math.ceil(wait_s / pace.train_s) - 1


def worst_staleness_when_overlapping(pace: RolloutPace) -> int:
    """The bound on Δ_max in learner steps under the overlap condition, whatever the capacity (equation 12)."""
    return pace.steps + math.ceil((1 - 1 / pace.steps) * pace.broadcast_s / pace.train_s)


def bubble_ratio(pace: RolloutPace, rollouts_per_s: float) -> float:
    """The predicted share of wall-clock time that the learner waits: 0 if the times overlap, 1 without workers.

    A publication period lasts κ steps of training, or the broadcast and the rollouts after it if those take longer.
    """
    if rollouts_per_s <= 0:
        return 1.0
    training_s = pace.steps * pace.train_s
    period_s = max(training_s, pace.broadcast_s + pace.needed_rollouts / rollouts_per_s)
    return 1 - training_s / period_s


# The equations above assume that engines sample nothing during a broadcast. The ledger lets them sample with the
# previous version, as far as the staleness bound allows (`ledger.staleness_rule`). Version v serves the batches of
# steps v + S + 1 - κ to v + S. Batch i after v has to be complete when that step starts. Engines that have used up
# their budget start it when v arrives: T_bcast + (i - S + κ) R / μ <= i T_train.


def _last_batches(pace: RolloutPace, staleness: int) -> range:
    """The batches of one version, counted from its publication."""
    if not 0 < pace.steps <= staleness + 1:
        raise UsageError(f"a version every {pace.steps} steps: with staleness {staleness}, 1 to {staleness + 1} can be")
    return range(staleness + 1 - pace.steps, staleness + 1)


def least_rollouts_per_s_within(pace: RolloutPace, staleness: int) -> float:
    """The lowest capacity at which a learner that trains on rollouts up to ``staleness`` steps old never waits. Raises
    UsageError if there is none.
    """
    rollouts = pace.rollouts / pace.trained_share
    least = rollouts / pace.train_s
    for batch in _last_batches(pace, staleness):
        spare_s = batch * pace.train_s - pace.broadcast_s
        if spare_s <= 0:
            raise UsageError(
                f"no number of workers keeps the learner busy: with staleness {staleness} and a version every "
                f"{pace.steps} steps, a broadcast must take less than {batch * pace.train_s:g} s, and takes "
                f"{pace.broadcast_s:g} s. Publish more often, or allow more staleness"
            )
        least = max(least, (batch - staleness + pace.steps) * rollouts / spare_s)
    return least


def bubble_ratio_within(pace: RolloutPace, staleness: int, rollouts_per_s: float) -> float:
    """The predicted share of wall-clock time that a learner waits if it trains on rollouts up to ``staleness`` steps
    old. The time of a single rollout is neglected.
    """
    batches = _last_batches(pace, staleness)
    if rollouts_per_s <= 0:
        return 1.0
    each_s = pace.rollouts / pace.trained_share / rollouts_per_s
    training_s = pace.steps * pace.train_s
    period_s = max(training_s, pace.steps * each_s)
    for batch in batches:
        periods, step = divmod(batch, pace.steps)
        ready_s = pace.broadcast_s + (batch - staleness + pace.steps) * each_s
        period_s = max(period_s, (ready_s + (pace.steps - step) * pace.train_s) / (periods + 1))
    return 1 - training_s / period_s
