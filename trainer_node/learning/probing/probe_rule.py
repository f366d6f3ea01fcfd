"""The divergence of an engine from the learner on the probe set, and the rule that raises the alarm. Pure.

With l the learner's log-probability of a token minus the engine's, the divergence is the mean over tokens of k3 =
exp(l) - l - 1, in nats (J. Schulman, "Approximating KL divergence", 2020). It is 0 for equal scores and positive
otherwise. Over fixed tokens it is no unbiased estimate of the KL divergence; for small l it is half the mean square.

The floor is what numerics alone cause: the lower median of all divergences of the first FLOOR_VERSIONS versions. So one
wrong engine of several does not raise it. The alarm of a later divergence is ALARM_FACTOR times the floor.

Guarantees: the floor is measured once and does not follow the run. A wrong engine cannot hide behind a high floor: the
floor is at most MOST_FLOOR, also while it is measured. No floor is below LEAST_FLOOR.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from p2pcast.ground.version import Version
from trainer_node.learning.monitoring.run_record import ALARM_FACTOR

FLOOR_VERSIONS: Final = 3
"""Versions over which the floor is measured."""
LEAST_FLOOR: Final = 1e-11
"""Nats a token. A floor of 0 would make every difference of rounding an alarm; two orders of sums in float32 give less
than this.
"""
MOST_FLOOR: Final = 0.05
"""Nats a token: a root mean square of 0.3 nats between two engines, beyond what bfloat16 causes."""
CLAMP: Final = 20.0
"""Largest logarithm of a ratio, so that one token keeps the mean finite."""


class JudgedProbe(NamedTuple):
    """``kl``: nats a token. ``floor``: None while it is measured."""

    kl: float
    floor: float | None
    alarm: bool


def divergence(learner: np.ndarray, engine: np.ndarray) -> float:
    """Nats a token. ``learner``, ``engine``: log-probabilities of the same tokens, (n,), n >= 1."""
    ratio = np.clip(learner.astype("<f8") - engine.astype("<f8"), -CLAMP, CLAMP)
    return max(0.0, float((np.expm1(ratio) - ratio).mean()))


@dataclass(slots=True)
class ProbeRule:
    """``floor``: of an earlier start of the run; None: measured anew."""

    floor: float | None = None
    _first: dict[Version, list[float]] = field(default_factory=dict)
    """Divergences of the first versions, while the floor is measured."""

    def judge(self, version: Version, kl: float) -> JudgedProbe:
        if self.floor is None and version not in self._first and len(self._first) == FLOOR_VERSIONS:
            found = statistics.median_low([each for kls in self._first.values() for each in kls])
            self.floor = min(MOST_FLOOR, max(LEAST_FLOOR, found))
        if self.floor is None:
            self._first.setdefault(version, []).append(kl)
        most = MOST_FLOOR if self.floor is None else self.floor
        return JudgedProbe(kl, self.floor, kl > ALARM_FACTOR * most)
