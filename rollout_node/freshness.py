"""How old a peer's knowledge of the newest version is. Pure: time is passed in, in seconds of one monotonic clock.

Promises: a message of the hub and a listing of the mirror always count; a version from the swarm counts only if its record, signed by the run's key, is newer than all before. So a parent
that repeats old versions, or sends only signs of life, does not make the peer's knowledge fresher.
"""

from __future__ import annotations

from p2pcast.version import Version


class Freshness:
    """``kept``: the newest version in the store and its age, when the process began; None: there was none."""

    def __init__(self, kept: tuple[Version, float] | None, now: float) -> None:
        self._newest = None if kept is None else kept[0]
        self._at = None if kept is None else now - max(0.0, kept[1])
        self._source = None if kept is None else "disk"

    @property
    def source(self) -> str | None:
        """Whose word is the last: hub, mirror, swarm, or disk (of an earlier process)."""
        return self._source

    def said(self, source: str, at: float) -> None:
        """Somebody who knows has said what is newest: the hub, or a mirror that was listed."""
        if self._at is None or at > self._at:
            self._at, self._source = at, source

    def saw(self, version: Version, at: float) -> None:
        """A signed record of ``version`` has come from a node."""
        if self._newest is None or version > self._newest:
            self._newest = version
            self.said("swarm", at)

    def age_s(self, now: float) -> float | None:
        return None if self._at is None else max(0.0, now - self._at)

    def stale(self, now: float, max_age_s: float | None) -> str | None:
        """Why a peer that wants its knowledge no older than ``max_age_s`` is unready; None: it is not."""
        if max_age_s is None:
            return None
        age_s = self.age_s(now)
        if age_s is None:
            return "neither hub, swarm nor mirror has yet said which version is the newest (--max-age)"
        return (
            f"the last news of the newest version is {age_s:.0f} s old (--max-age {max_age_s:g})" if age_s > max_age_s else None
        )
