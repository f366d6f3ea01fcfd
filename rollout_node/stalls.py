"""Which sealed artifacts make no progress at this peer. Pure: time is passed in, in seconds of one monotonic clock.

Promises: an artifact counts as stalled only when neither this artifact nor any before it on the way has made progress for the time allowed; time in which this
node itself did not listen, or did not look, does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LATE_S = 3.0
"""Time between two looks, in seconds, beyond which the second says nothing about other nodes: this node stood still, or had nothing to look at."""


@dataclass(frozen=True, slots=True)
class Row:
    """One artifact of the way. ``progress`` grows with every record and piece of it; ``patience_s``: so long it may stand still."""

    artifact: bytes
    progress: int
    patience_s: float


class Stalls:
    def __init__(self) -> None:
        self._marks: dict[bytes, tuple[int, float]] = {}
        """Artifact → its progress, and when that or what comes before it last changed."""
        self._looked_at: float | None = None

    def look(self, way: Iterable[Row], now: float, *, deaf: bool = False) -> list[bytes]:
        """Those that are stalled. ``way``: what is still to come, in the order in which it is needed. ``deaf``: this node does not listen just now."""
        late = self._looked_at is None or now - self._looked_at > LATE_S
        self._looked_at = now
        marks, stalled = {}, []
        moved = deaf or late
        for row in way:
            progress, since = self._marks.get(row.artifact, (None, now))
            # What follows waits for its turn: a parent that sends one version sends the next later.
            moved = moved or progress != row.progress
            since = now if moved else since
            marks[row.artifact] = (row.progress, since)
            if now - since > row.patience_s:
                stalled.append(row.artifact)
        self._marks = marks
        return stalled
