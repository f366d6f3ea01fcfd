"""Finds sealed artifacts that make no progress at this peer. It does no I/O; time is passed in, in monotonic seconds.

Guarantees:

- An artifact counts as stalled only if neither it nor any artifact before it on the path has made progress within the
  allowed time.
- Time during which this node did not read or did not check does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LATE_S = 3.0
"""If two checks are more seconds apart than this, the second says nothing about other nodes, because this node was
stopped or had nothing to check.
"""


@dataclass(frozen=True, slots=True)
class StallRow:
    """One artifact on the path. ``progress`` grows with each of its records and pieces; ``patience_s``: seconds for
    which it may make no progress.
    """

    artifact: bytes
    progress: int
    patience_s: float


class Stalls:
    def __init__(self) -> None:
        self._marks: dict[bytes, tuple[int, float]] = {}
        """Artifact → its progress, and when its progress or that of an artifact before it last changed."""
        self._checked_at: float | None = None

    def find(self, path: Iterable[StallRow], now: float, *, deaf: bool = False) -> list[bytes]:
        """Return the stalled artifacts. ``path``: the missing artifacts, in the order in which they are needed.
        ``deaf``: whether this node is not reading from its parents.
        """
        late = self._checked_at is None or now - self._checked_at > LATE_S
        self._checked_at = now
        marks, stalled = {}, []
        moved = deaf or late
        for row in path:
            progress, since = self._marks.get(row.artifact, (None, now))
            # A parent that is sending one version sends the next one later.
            moved = moved or progress != row.progress
            since = now if moved else since
            marks[row.artifact] = (row.progress, since)
            if now - since > row.patience_s:
                stalled.append(row.artifact)
        self._marks = marks
        return stalled
