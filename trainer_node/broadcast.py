"""The newest version on its way: who has not staged it yet. While it is, plans stay as they are, but for peers that are lost. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from p2pcast.version import Version

SETTLED_S = 30.0
"""After a broadcast, plans may change once all have it, or after this long."""


class Broadcast:
    """At most one at a time: a newer version takes its place."""

    def __init__(self) -> None:
        self.time_to_last_s: float | None = None
        """From the start of publishing to the last peer that staged it; None until then, and when it came to nothing."""
        self._version: Version | None = None
        self._since_s = 0.0
        self._awaited: set[str] = set()
        self._anybody = False

    def begin(self, version: Version, peers: Iterable[str], now_s: float) -> None:
        """``peers``: those that are there. Who joins later is not waited for."""
        self._version, self._since_s, self._awaited, self.time_to_last_s = version, now_s, set(peers), None
        self._anybody = bool(self._awaited)

    @property
    def awaited(self) -> Collection[str]:
        """Who was there when it began and, when that was last looked at, had not all of it."""
        return () if self._version is None else self._awaited

    def end(self) -> None:
        """It came to nothing."""
        self._version = None

    def settled(self, staged: Mapping[str, Version | None], now_s: float) -> bool:
        """``staged``: what each peer that is there, and is waited for, has. True once: when the last has it, or it has taken too long."""
        version = self._version
        if version is None:
            return False
        self._awaited = {i for i in self._awaited if i in staged and ((s := staged[i]) is None or s < version)}
        if not self._awaited:
            self.time_to_last_s = now_s - self._since_s if self._anybody else None
        elif now_s - self._since_s <= SETTLED_S:
            return False
        self._version = None
        return True
