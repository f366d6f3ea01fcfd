"""Which sealed artifacts make no progress at this peer. Pure: time is passed in, in seconds of one monotonic clock.

Promises:

- An artifact counts as stalled only when neither this artifact nor any before it on the way has made progress for the
  time allowed.
- Time in which this node did not listen, or did not check, does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LATE_S = 3.0
"""Time between two checks, in seconds, beyond which the second says nothing about other nodes: this node stood still,
or had nothing to check.
"""


@dataclass(frozen=True, slots=True)
class StallRow:
    """One artifact of the way. ``progress`` grows with every record and piece of it; ``patience_s``: time for which it
    may make no progress, in seconds.
    """

    artifact: bytes
    progress: int
    patience_s: float


class Stalls:
    def __init__(self) -> None:
        self._marks: dict[bytes, tuple[int, float]] = {}
        """Artifact → its progress, and when that or the progress of an artifact before it last changed."""
        self._checked_at: float | None = None

    def find(self, path: Iterable[StallRow], now: float, *, deaf: bool = False) -> list[bytes]:
        """The stalled artifacts. ``path``: those that are missing, in the order in which they are needed. ``deaf``:
        this node reads nothing from its parents now.
        """
        late = self._checked_at is None or now - self._checked_at > LATE_S
        self._checked_at = now
        marks, stalled = {}, []
        moved = deaf or late
        for row in path:
            progress, since = self._marks.get(row.artifact, (None, now))
            # A parent that sends one version sends the next one later.
            moved = moved or progress != row.progress
            since = now if moved else since
            marks[row.artifact] = (row.progress, since)
            if now - since > row.patience_s:
                stalled.append(row.artifact)
        self._marks = marks
        return stalled
