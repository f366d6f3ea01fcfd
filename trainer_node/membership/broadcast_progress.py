"""The progress of the newest version: which peers have not staged it yet. Plans do not change during a broadcast,
except around lost peers. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from p2pcast.ground.version import Version

SETTLED_S = 30.0
"""Plans may change once all peers have the version, or after this many seconds. Slow peers are looked for until the
last peer has it: a large version takes minutes.
"""
MOST = 1 / 1.1
"""Plans may also change once this share of the peers has the version and as much time again has passed. The rest is
slow, and behind a fast trainer a better plan would wait for ever. ECHO-2 (section 5.5.1) takes the same share.
"""
SOONEST_S = 1.0
"""Plans for the slow rest are not made sooner, in seconds: reports come every second."""


class BroadcastProgress:
    """One broadcast at a time: a newer version replaces the last one."""

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
        """The broadcast has taken longer than SETTLED_S."""

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
        """Peers that were joined when the version began and had not staged it at the last look."""
        return () if self._version is None else self._awaited

    def end(self) -> None:
        """The version was given up."""
        self._version = None

    def settled(self, staged: Mapping[str, Version | None], now_s: float) -> bool:
        """``staged``: the version of each joined peer that is waited for. True once a broadcast. That is when the last
        peer has the version, when most peers have it and the rest is far behind, or when the broadcast takes too long.
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
