"""Which artifacts a store may let go. Pure.

Rule (design, section 5; PULSE, appendix G.7): the newest KEEP_DELTAS deltas and KEEP_ANCHORS anchors stay, and whatever the newest version needs: its newest anchor and the chain from there.
"""

from __future__ import annotations

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
    """The newest version's anchor and the deltas from it, as far back as they go."""
    chain: set[bytes] = set()
    at: Version | None = every[0].version if every else None
    while at is not None:
        anchor = next((a for a in every if a.version == at and a.base is None), None)
        if anchor is not None:
            return chain | {anchor.id}
        step = next((a for a in every if a.version == at), None)
        if step is None:
            return chain
        chain.add(step.id)
        at = step.base
    return chain
