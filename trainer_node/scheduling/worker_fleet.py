"""Chooses which workers to run: the cheapest fleet with enough capacity, changed only after a sustained deviation.
Pure; time is passed in.

Source: ECHO-2, equations 3 and 4 and appendix C.2.1. Workers are ranked by price per rollout, and the cheapest prefix
is taken. Beyond the paper, a prefix that exceeds the target is pruned: its most expensive unneeded member is removed,
and so on. Releasing means draining: the worker finishes or returns its leases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

MEASUREMENTS = 3
"""Number of consecutive measurements that must deviate before the fleet changes."""
WINDOW_S = 60.0
"""Shortest time that these measurements must span, in seconds."""
RELEASE_MARGIN = 0.15
"""Capacity above the target, as a share of the target, at which a worker may be released."""


@dataclass(frozen=True, slots=True)
class CandidateWorker:
    """``usd_per_h``: price. ``rollouts_per_s``: end to end, with rewards and network. ``fixed``: never released."""

    name: str
    usd_per_h: float
    rollouts_per_s: float
    fixed: bool = False

    @property
    def usd_per_rollout(self) -> float:
        """ρ, up to a constant factor."""
        return self.usd_per_h / self.rollouts_per_s if self.rollouts_per_s > 0 else float("inf")


def _rank(one: CandidateWorker) -> tuple[float, str]:
    return one.usd_per_rollout, one.name


def by_price_per_rollout(candidates: Iterable[CandidateWorker]) -> list[CandidateWorker]:
    """Workers that make rollouts, the cheapest per rollout first."""
    return sorted((one for one in candidates if one.rollouts_per_s > 0), key=_rank)


def cheapest(candidates: Iterable[CandidateWorker], target_per_s: float) -> list[CandidateWorker] | None:
    """Return a fleet that makes at least ``target_per_s`` rollouts per second, by ascending price per rollout, or None
    if all candidates together do not reach the target.
    """
    chosen: list[CandidateWorker] = []
    capacity = 0.0
    for one in by_price_per_rollout(candidates):
        if capacity >= target_per_s:
            break
        chosen.append(one)
        capacity += one.rollouts_per_s
    if capacity < target_per_s:
        return None
    for one in sorted(chosen, key=lambda c: (-c.usd_per_h, c.name)):
        if sum(c.rollouts_per_s for c in chosen if c is not one) >= target_per_s:
            chosen.remove(one)
    return chosen


@dataclass(frozen=True, slots=True)
class FleetChange:
    """Workers to start and to drain."""

    activate: tuple[CandidateWorker, ...] = ()
    release: tuple[CandidateWorker, ...] = ()


NO_CHANGE = FleetChange()


def change_for(
    target_per_s: float, active: Collection[CandidateWorker], standby: Collection[CandidateWorker]
) -> FleetChange:
    """The change that a lasting deviation calls for. ``active``, ``standby``: see ``FleetControl.decide``."""
    capacity = _capacity(active)
    side = _side(capacity, target_per_s)
    if side < 0:
        return FleetChange(activate=_additions(target_per_s - capacity, standby))
    return FleetChange(release=_surplus(target_per_s, active)) if side > 0 else NO_CHANGE


def _capacity(active: Collection[CandidateWorker]) -> float:
    return sum(c.rollouts_per_s for c in active)


def _side(capacity: float, target_per_s: float) -> int:
    """Return -1 for a capacity below the target, 1 for one above it by the margin, else 0."""
    return -1 if capacity < target_per_s else int(capacity > (1 + RELEASE_MARGIN) * target_per_s)


class FleetControl:
    """Decides on changes from repeated measurements. ``window_s``: how long a deviation must last, in seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._side = 0
        """-1 while capacity is below the target, 1 while it is above by the margin."""
        self._since_s = 0.0
        self._measurements = 0

    def decide(
        self,
        now_s: float,
        target_per_s: float,
        active: Collection[CandidateWorker],
        standby: Collection[CandidateWorker],
    ) -> FleetChange:
        """Take one measurement. ``active``: running workers, with their measured rates; a dead worker's rate is 0. A
        starting worker has its expected rate, or each measurement during its start would ask for another worker.
        ``standby``: further workers that could be started.
        """
        side = _side(_capacity(active), target_per_s)
        if side != self._side:
            self._side, self._since_s, self._measurements = side, now_s, 0
        self._measurements += 1
        if side == 0 or self._measurements < MEASUREMENTS or now_s - self._since_s < self._window_s:
            return NO_CHANGE
        change = change_for(target_per_s, active, standby)
        if change != NO_CHANGE:
            self._side = 0
        return change


def _additions(lacking_per_s: float, standby: Collection[CandidateWorker]) -> tuple[CandidateWorker, ...]:
    """Return the cheapest workers per rollout that close the gap, or all if they do not."""
    added: list[CandidateWorker] = []
    for one in by_price_per_rollout(standby):
        if lacking_per_s <= 0:
            break
        added.append(one)
        lacking_per_s -= one.rollouts_per_s
    return tuple(added)


def _surplus(target_per_s: float, active: Collection[CandidateWorker]) -> tuple[CandidateWorker, ...]:
    """Return the most expensive workers per rollout that are not needed to reach the target."""
    kept = set(active)
    released: list[CandidateWorker] = []
    for one in sorted((one for one in active if not one.fixed), key=_rank, reverse=True):
        if sum(c.rollouts_per_s for c in kept if c is not one) < target_per_s:
            break
        kept.remove(one)
        released.append(one)
    return tuple(released)
