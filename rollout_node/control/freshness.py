"""How old a peer's knowledge of the newest version is. It does no I/O; time is passed in, in monotonic seconds.

Guarantees: a message from the hub or a listing of the mirror always counts. A version from the swarm counts only if its
signed record is newer than all earlier ones. So a parent that repeats old versions, or only sends keepalives, does not
make the peer's knowledge fresher.
"""

from __future__ import annotations

from p2pcast.ground.version import Version


class Freshness:
    """``kept``: the newest version in the store at startup and its age in seconds; None if the store was empty."""

    def __init__(self, kept: tuple[Version, float] | None, now: float) -> None:
        self._newest = None if kept is None else kept[0]
        self._at = None if kept is None else now - max(0.0, kept[1])
        self._source = None if kept is None else "disk"

    @property
    def source(self) -> str | None:
        """The source of the last news: hub, mirror, swarm, or disk (an earlier process)."""
        return self._source

    def note_source(self, source: str, at: float) -> None:
        """Record that the hub or a listed mirror confirmed which version is the newest."""
        if self._at is None or at > self._at:
            self._at, self._source = at, source

    def note_version(self, version: Version, at: float) -> None:
        """Record that a node sent a signed record of ``version``."""
        if self._newest is None or version > self._newest:
            self._newest = version
            self.note_source("swarm", at)

    def age_s(self, now: float) -> float | None:
        return None if self._at is None else max(0.0, now - self._at)

    def stale(self, now: float, max_age_s: float | None) -> str | None:
        """Why a peer with the limit ``max_age_s`` is unready; None if its knowledge is fresh enough."""
        if max_age_s is None:
            return None
        age_s = self.age_s(now)
        if age_s is None:
            return "neither hub, swarm nor mirror has yet said which version is the newest (--max-age)"
        return (
            f"the last news of the newest version is {age_s:.0f} s old (--max-age {max_age_s:g})"
            if age_s > max_age_s
            else None
        )
