"""The newest version on its way: who has not staged it yet. While it is, plans stay as they are, but for peers that are lost. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from p2pcast.version import Version

SETTLED_S = 30.0
"""Plans may change once all have it, or after this long. Who is slow is looked for until the last has it all the same: a large version takes minutes."""
MOST = 1 / 1.1
"""Or once this share has it and as much time again has passed: the rest is slow, and a plan that could help would wait for ever behind a fast
trainer. ECHO-2 (section 5.5.1) takes the same share for the fleet."""
SOONEST_S = 1.0
"""No planning for the rest before this: reports come every second."""


class Broadcast:
    """At most one at a time: a newer version takes its place."""

    def __init__(self) -> None:
        self.time_to_last_s: float | None = None
        """From the start of publishing to the last peer that staged it; None until then, and when it came to nothing."""
        self._version: Version | None = None
        self._since_s = 0.0
        self._awaited: set[str] = set()
        self._peers = 0
        self._most_s: float | None = None
        """When most had it, from the start."""
        self._planned = False
        self._long = False
        """It has taken longer than SETTLED_S."""

    def begin(self, version: Version, peers: Iterable[str], now_s: float) -> None:
        """``peers``: those that are there. Who joins later is not waited for."""
        self._version, self._since_s, self._awaited, self.time_to_last_s = version, now_s, set(peers), None
        self._peers, self._most_s, self._planned, self._long = len(self._awaited), None, False, False

    @property
    def under_way(self) -> bool:
        """Whether plans have to wait for it."""
        return self._version is not None and not self._long

    @property
    def awaited(self) -> Collection[str]:
        """Who was there when it began and, when that was last looked at, had not all of it."""
        return () if self._version is None else self._awaited

    def end(self) -> None:
        """It came to nothing."""
        self._version = None

    def settled(self, staged: Mapping[str, Version | None], now_s: float) -> bool:
        """``staged``: what each peer that is there, and is waited for, has. True once: when the last has it, when most have and the
        rest is far behind, or when it has taken too long."""
        version = self._version
        if version is None:
            return False
        self._awaited = {i for i in self._awaited if i in staged and ((s := staged[i]) is None or s < version)}
        took_s, planned = now_s - self._since_s, self._planned
        if not self._awaited:
            self.time_to_last_s = took_s if self._peers else None
        if self._most_s is None and len(self._awaited) <= (1 - MOST) * self._peers:
            self._most_s = took_s
        patient = self._most_s is None or took_s <= max(2 * self._most_s, self._most_s + SOONEST_S)
        self._long = took_s > SETTLED_S
        if self._awaited:
            self._planned = planned or self._long or not patient
            return self._planned and not planned
        self._version = None
        return not planned
