"""Which artifacts a store may let go. Pure.

Rule (design, section 5; PULSE, appendix G.7): the newest KEEP_DELTAS deltas and KEEP_ANCHORS anchors stay, and whatever the newest version needs: its newest anchor and the chain from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from p2pcast.version import Version

KEEP_DELTAS = 100
KEEP_ANCHORS = 10
ANCHOR_EVERY = 50
"""Versions between anchors: PULSE's interval."""


class Kept(Protocol):
    @property
    def id(self) -> bytes: ...
    @property
    def base(self) -> Version | None: ...
    @property
    def version(self) -> Version: ...


def expendable(artifacts: Iterable[Kept], *, deltas: int = KEEP_DELTAS, anchors: int = KEEP_ANCHORS) -> list[bytes]:
    """Ids that may go, oldest first."""
    every = sorted(artifacts, key=lambda a: (a.version, a.base is None), reverse=True)
    kept = {a.id for a in [x for x in every if x.base is not None][:deltas]}
    kept |= {a.id for a in [x for x in every if x.base is None][:anchors]}
    kept |= _newest_chain(every)
    return [a.id for a in reversed(every) if a.id not in kept]


def _newest_chain(every: list[Kept]) -> set[bytes]:
    """The newest version's chain: an anchor and the deltas from it, the fewest; if no anchor is left, as far back as deltas go."""
    if not every:
        return set()
    start = every[0].version
    ways: dict[Version, list[bytes]] = {start: []}
    queue = deque([start])
    longest: list[bytes] = []
    while queue:
        at = queue.popleft()
        for artifact in (a for a in every if a.version == at):
            way = [*ways[at], artifact.id]
            if artifact.base is None:
                return set(way)
            if artifact.base not in ways:
                ways[artifact.base] = longest = way
                queue.append(artifact.base)
    return set(longest)
