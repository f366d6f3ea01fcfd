"""Delays between retries: exponential, capped, with jitter. Pure: the source of randomness is passed in.

Guarantee: no delay exceeds ``cap_s * (1 + jitter)``. Jitter spreads the retries of many nodes that failed together.
"""

from __future__ import annotations

from collections.abc import Callable

REDIAL_MIN_S = 0.2
REDIAL_MAX_S = 5.0
"""Longest delay, in seconds, between attempts to reach the hub, or the lead of an engine group."""

Uniform = Callable[[float, float], float]
"""Returns a random number between its two arguments, like ``random.uniform``."""


class Backoff:
    """``next_s`` returns the delay before the next retry. Call ``reset`` after a success."""

    def __init__(
        self, base_s: float, cap_s: float, uniform: Uniform | None, *, jitter: float = 0.5, factor: float = 2.0
    ) -> None:
        """``base_s``: first delay; ``cap_s``: largest delay before jitter; ``jitter``: largest deviation, as a fraction
        of the delay; ``factor``: growth from one delay to the next. If ``uniform`` is None, delays have no jitter.
        """
        if not 0 < base_s <= cap_s or factor < 1 or not 0 <= jitter < 1:
            raise ValueError(f"no backoff from {base_s:g} s to {cap_s:g} s, factor {factor:g}, jitter {jitter:g}")
        self._base_s = base_s
        self._cap_s = cap_s
        self._uniform = uniform
        self._jitter = jitter
        self._factor = factor
        self._delay_s = base_s
        self._attempts = 0

    @property
    def attempts(self) -> int:
        """The number of delays since the start or the last reset."""
        return self._attempts

    def next_s(self, at_most_s: float | None = None) -> float:
        """Return the delay before the next retry, in seconds, and increase the one after it. ``at_most_s``: a cap,
        before jitter, on this delay; later delays grow from there.
        """
        delay_s = self._delay_s if at_most_s is None else min(at_most_s, self._delay_s)
        self._delay_s = min(self._cap_s, delay_s * self._factor)
        self._attempts += 1
        if self._uniform is None:
            return delay_s
        return delay_s * self._uniform(1 - self._jitter, 1 + self._jitter)

    def reset(self) -> None:
        """Start again from the first delay, after a retry that succeeded."""
        self._delay_s, self._attempts = self._base_s, 0
