"""How long the learner trains and waits, and how long versions take to the engines, as the ledger sees it. Pure.

Source: the quantities of ECHO-2, section 3.3: T_train, T_bcast, and the bubble ratio, measured instead of stated.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from p2pcast.ground.version import Version

KEPT = 16
"""Newest steps, and newest versions, whose times count."""
SERVED_SHARE = 0.9
"""Share of the workers' engines that serve a version when its broadcast counts as over: 1/γ of ECHO-2, section 4.3."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times in seconds. ``rollouts``: of the batch."""

    wait_s: float
    train_s: float
    rollouts: int


class LearnerTimes:
    """All times ``now_s`` are seconds from one origin."""

    def __init__(self) -> None:
        self._steps: deque[StepTimes] = deque(maxlen=KEPT)
        self._broadcasts_s: deque[float] = deque(maxlen=KEPT)
        self._asked: tuple[int, float] | None = None
        self._taken: tuple[int, float, float, int] | None = None
        self._on_the_way: dict[Version, float] = {}

    def resumed(self) -> None:
        """Another learner, or the same one after a restart: the step in progress does not count."""
        self._asked = self._taken = None

    def asked(self, step: int, now_s: float) -> None:
        """The learner asks for the batch of its step; again after each answer without a batch."""
        if self._asked is None or self._asked[0] != step:
            self._asked = (step, now_s)

    def taken(self, step: int, rollouts: int, now_s: float) -> None:
        """The learner gets the batch; again if the answer was lost."""
        if self._asked is not None and self._asked[0] == step and (self._taken is None or self._taken[0] != step):
            self._taken = (step, now_s, now_s - self._asked[1], rollouts)

    def applied(self, step: int, now_s: float) -> None:
        """The learner has applied the batch of ``step``; again if the answer was lost."""
        if self._taken is not None and self._taken[0] == step:
            _, taken_s, wait_s, rollouts = self._taken
            self._steps.append(StepTimes(wait_s, now_s - taken_s, rollouts))
            self._taken = None

    def known(self, version: Version, now_s: float) -> None:
        """The version is published."""
        self._on_the_way[version] = now_s
        while len(self._on_the_way) > KEPT:
            del self._on_the_way[next(iter(self._on_the_way))]

    def serve(self, versions: Collection[Version], now_s: float) -> None:
        """Versions that the workers' engines serve now, one each."""
        for version in list(self._on_the_way):
            reached = sum(served >= version for served in versions)
            if versions and reached >= math.ceil(SERVED_SHARE * len(versions)):
                self._broadcasts_s.append(now_s - self._on_the_way.pop(version))

    def document(self) -> dict[str, Any]:
        """Medians in seconds, None where nothing is measured. ``bubble``: share of the time that the learner waited."""
        steps = self._steps
        spent_s = sum(step.wait_s + step.train_s for step in steps)
        return {
            "steps": len(steps),
            "train_s": _median([step.train_s for step in steps]),
            "wait_s": _median([step.wait_s for step in steps]),
            "rollouts": None if not steps else round(statistics.median(step.rollouts for step in steps)),
            "bubble": round(sum(step.wait_s for step in steps) / spent_s, 4) if spent_s > 0 else None,
            "broadcast_s": _median(self._broadcasts_s),
        }


def _median(values: Collection[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
