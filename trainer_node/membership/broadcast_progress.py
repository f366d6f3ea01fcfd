"""The newest version's progress: which peers have not staged it yet. During a broadcast, plans change only around lost
peers. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from p2pcast.ground.version import Version

SETTLED_S = 30.0
"""Plans may change once all peers have the version, or after this many seconds. The search for slow peers continues
until the last peer has it, because a large version takes minutes.
"""
MOST = 1 / 1.1
"""Plans may also change once this share of the peers has the version and the same time has passed again. The others are
slow, and if the trainer is fast, a better plan would otherwise never come. ECHO-2 (section 5.5.1) uses the same share.
"""
SOONEST_S = 1.0
"""Earliest time for plans around the slow peers, in seconds, because reports come every second."""


class BroadcastProgress:
    """One broadcast at a time; a newer version replaces the current one."""

    def __init__(self) -> None:
        self.time_to_last_s: float | None = None
        """Seconds from the start of publishing to the last peer's staging; None until then, and after a failed version.
        """
        self._version: Version | None = None
        self._since_s = 0.0
        self._awaited: set[str] = set()
        self._peers = 0
        self._most_s: float | None = None
        """Seconds from the start until most peers had the version."""
        self._planned = False
        self._long = False
        """Whether the broadcast has taken longer than SETTLED_S."""

    def begin(self, version: Version, peers: Iterable[str], now_s: float) -> None:
        """``peers``: the joined peers. Peers that join later are not waited for."""
        self._version, self._since_s, self._awaited, self.time_to_last_s = version, now_s, set(peers), None
        self._peers, self._most_s, self._planned, self._long = len(self._awaited), None, False, False

    @property
    def under_way(self) -> bool:
        """Whether plans have to wait for the broadcast."""
        return self._version is not None and not self._long

    @property
    def awaited(self) -> Collection[str]:
        """Peers that were joined when the version began and had not staged it when last checked."""
        return () if self._version is None else self._awaited

    def end(self) -> None:
        """Called when the version was given up."""
        self._version = None

    def settled(self, staged: Mapping[str, Version | None], now_s: float) -> bool:
        """Whether plans may now change. True once per broadcast: when the last peer has the version, when most peers do
        and the others are far behind, or when the broadcast takes too long. ``staged``: each awaited peer's version.
        """
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
