"""Plans a run's fleet in advance: which workers, their cost, and how long the learner is predicted to wait. Pure.

Capacity follows ECHO-2's equations 2 and 3 with its margin γ. There are two predictions of the bubble ratio. In
ECHO-2's, engines sample nothing during a broadcast. The other one follows the ledger's pace rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2pcast.ground.errors import UsageError
from trainer_node.scheduling.overlap import (
    CAPACITY_MARGIN,
    RolloutPace,
    bubble_ratio,
    bubble_ratio_within,
    least_rollouts_per_s,
    worst_staleness,
)
from trainer_node.scheduling.worker_fleet import CandidateWorker, by_price_per_rollout, cheapest

MOST_WORKERS = 10_000
"""Most workers of all offers together; with more, a plan would take minutes."""


@dataclass(frozen=True, slots=True)
class WorkerOffer:
    """Up to ``count`` workers of one kind. ``usd_per_h``, ``rollouts_per_s``: of each worker."""

    kind: str
    usd_per_h: float
    rollouts_per_s: float
    count: int

    def __post_init__(self) -> None:
        finite = math.isfinite(self.usd_per_h) and math.isfinite(self.rollouts_per_s)
        if not (finite and self.usd_per_h >= 0 and self.rollouts_per_s > 0 and self.count >= 1):
            raise UsageError(
                f"offer {self.kind}: the price must be at least 0, the rate above 0 and the count at least 1, not "
                f"{self.usd_per_h:g}, {self.rollouts_per_s:g} and {self.count}"
            )

    def faster(self, times: float) -> WorkerOffer:
        """Workers of the same price that make ``times`` as many rollouts."""
        return replace(self, rollouts_per_s=times * self.rollouts_per_s)

    def candidates(self) -> list[CandidateWorker]:
        return [CandidateWorker(f"{self.kind}-{n}", self.usd_per_h, self.rollouts_per_s) for n in range(self.count)]


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a fleet is predicted to achieve. ``usd_per_step``: cost of fleet and learner, including waiting. ``bubble``:
    ECHO-2's prediction. ``bubble_within``: the pace rule's.
    """

    workers: int
    rollouts_per_s: float
    usd_per_h: float
    usd_per_step: float
    bubble: float
    bubble_within: float
    staleness: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """``least_per_s``: μ_min. ``target_per_s``: with the margin. ``chosen``: None if all offers together are not
    enough. ``growth``: prospects of the cheapest 1, 2, … workers by price per rollout.
    """

    least_per_s: float
    target_per_s: float
    chosen: tuple[CandidateWorker, ...] | None
    prospect: Prospect
    growth: tuple[Prospect, ...]


def planned(
    pace: RolloutPace,
    staleness: int,
    offers: Sequence[WorkerOffer],
    *,
    learner_usd_per_h: float = 0.0,
    margin: float = CAPACITY_MARGIN,
) -> FleetPlan:
    """Plan a fleet. Raises UsageError if offers repeat a kind, or if no number of workers keeps the learner busy."""
    kinds = [offer.kind for offer in offers]
    if not kinds or len(set(kinds)) != len(kinds):
        raise UsageError("a plan needs at least one offer, and one offer of each kind")
    if sum(offer.count for offer in offers) > MOST_WORKERS:
        raise UsageError(f"offers of more than {MOST_WORKERS} workers together")
    least = least_rollouts_per_s(pace)
    candidates = by_price_per_rollout(one for offer in offers for one in offer.candidates())
    chosen = cheapest(candidates, margin * least)

    def prospect(fleet: Sequence[CandidateWorker]) -> Prospect:
        return prospect_of(pace, staleness, fleet, learner_usd_per_h)

    return FleetPlan(
        least,
        margin * least,
        None if chosen is None else tuple(chosen),
        prospect(candidates if chosen is None else chosen),
        tuple(prospect(candidates[:count]) for count in range(1, len(candidates) + 1)),
    )


def prospect_of(
    pace: RolloutPace, staleness: int, fleet: Sequence[CandidateWorker], learner_usd_per_h: float
) -> Prospect:
    rate = sum(one.rollouts_per_s for one in fleet)
    usd_per_h = sum(one.usd_per_h for one in fleet)
    bubble = bubble_ratio(pace, rate)
    step_s = pace.train_s / (1 - bubble)
    return Prospect(
        len(fleet),
        rate,
        usd_per_h,
        (usd_per_h + learner_usd_per_h) * step_s / 3600,
        bubble,
        bubble_ratio_within(pace, staleness, rate),
        worst_staleness(pace, rate),
    )
