"""Measurements of the artifacts that were received: the last one, for the hub, and the fastest one."""

from __future__ import annotations

from p2pcast.ground import limits

MEASURABLE_BYTES = limits.MIB
"""A smaller transfer is over before its rate is known."""


class Transfers:
    def __init__(self) -> None:
        self.fastest_bps = 0.0
        """Rate of the fastest transfer of more than ``MEASURABLE_BYTES``, in bits per second; 0: none yet."""
        self._last: tuple[int, int] | None = None

    def received(self, size: int, took_s: float) -> None:
        """``size`` bytes of an artifact came in."""
        self._last = (size, int(took_s * 1e6))
        if size > MEASURABLE_BYTES:
            self.fastest_bps = max(self.fastest_bps, 8 * size / took_s)

    def take_last(self) -> tuple[int, int] | None:
        """Bytes and microseconds of the last transfer; None when it was taken before."""
        last, self._last = self._last, None
        return last
