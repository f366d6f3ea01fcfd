"""When workers are told that the run has ended: after its last step, and after the evaluations that follow it. Pure.

Guarantee: a trainer that dies delays the workers' end by no more than the time that it has named.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RunEnd:
    """``finished``: whether the last step is applied. ``clock``: seconds from any origin."""

    def __init__(self, finished: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._finished, self._clock = finished, clock
        self._stay_s = 0.0
        self._since_s: float | None = None

    def stay(self, for_s: float) -> None:
        """Workers stay for ``for_s`` seconds after the last step; 0: they end with it."""
        self._stay_s = for_s

    def over(self) -> bool:
        """Whether a worker without jobs may end."""
        if not self._finished():
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = self._clock()
        return self._clock() - self._since_s >= self._stay_s
