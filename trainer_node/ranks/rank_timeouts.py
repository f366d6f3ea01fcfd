"""Finds the ranks of a trainer that keep the others waiting too long. Pure: time is passed in, in seconds of one
monotonic clock.

Guarantees:

- A rank must make progress with the version.
- A live connection by itself does not count as progress.

There is no limit for a rank that the hub does not read from, or that no other rank waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RankTimeouts:
    """``wait_s``: the limit in seconds; 0 disables it."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._marks: dict[int, tuple[Any, float]] = {}

    def overdue(self, awaited: Mapping[int, Any], now: float) -> list[int]:
        """Return the ranks that have made no progress for too long. ``awaited``: the ranks that the others wait for,
        with the progress of each.
        """
        marks = {}
        for rank, progress in awaited.items():
            known = self._marks.get(rank)
            marks[rank] = known if known is not None and known[0] == progress else (progress, now)
        self._marks = marks
        return (
            [] if not self.wait_s else sorted(rank for rank, (_, since) in marks.items() if now - since >= self.wait_s)
        )
