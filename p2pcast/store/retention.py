"""Which artifacts a store may remove. Pure.

Rule (design, section 5; PULSE, appendix G.6): the newest KEEP_DELTAS deltas and KEEP_ANCHORS anchors are kept, and
every anchor that is the base of a kept delta. The newest version's chain is kept too: its newest anchor and the deltas
from there. So a version at the end of kept deltas stays available as long as there is an anchor for it. A squash (a
delta to a version that also has a delta from a newer base) does not count towards KEEP_DELTAS. It is kept while a kept
artifact leads to its base, up to KEEP_DELTAS squashes. The counts are configurable (``RetentionCounts``).

Squashes are optional: if there is no space for a version, they are removed first (``dispensable``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from p2pcast.ground import limits
from p2pcast.ground.version import Version

KEEP_DELTAS = 100
KEEP_ANCHORS = 10
ANCHOR_EVERY = 50
"""Number of versions between anchors: PULSE's interval."""


@dataclass(frozen=True, slots=True)
class RetentionCounts:
    """Numbers of artifacts to keep. None means KEEP_DELTAS, KEEP_ANCHORS, and the whole chain.

    ``chain``: the longest chain that is kept. A peer may never get a second anchor and would otherwise keep all deltas
    since the first; other nodes have newer anchors.
    """

    deltas: int | None = None
    anchors: int | None = None
    chain: int | None = None


DEFAULT = RetentionCounts()
AT_A_PEER = RetentionCounts(chain=limits.MAX_KEPT)


class KeptArtifact(Protocol):
    @property
    def id(self) -> bytes: ...
    @property
    def base(self) -> Version | None: ...
    @property
    def version(self) -> Version: ...


def expendable(artifacts: Iterable[KeptArtifact], counts: RetentionCounts = DEFAULT) -> list[bytes]:
    """Return the ids of artifacts that may be removed, oldest first."""
    deltas = KEEP_DELTAS if counts.deltas is None else counts.deltas
    anchors = KEEP_ANCHORS if counts.anchors is None else counts.anchors
    every = sorted(artifacts, key=lambda a: (a.version, a.base is None), reverse=True)
    squashes = _squashes(every)
    kept = {a.id for a in [x for x in every if x.base is not None and x.id not in squashes][:deltas]}
    kept |= {a.id for a in [x for x in every if x.base is None][:anchors]}
    chain = _newest_chain(every)
    kept |= chain if counts.chain is None or len(chain) <= counts.chain else set()
    begun = {a.base for a in every if a.id in kept}
    kept |= {a.id for a in every if a.base is None and a.version in begun}
    ends = {v for a in every if a.id in kept for v in (a.version, a.base) if v is not None}
    kept |= {a.id for a in [x for x in every if x.id in squashes and x.base in ends and x.version in ends][:deltas]}
    return [a.id for a in reversed(every) if a.id not in kept]


def dispensable(artifacts: Iterable[KeptArtifact]) -> list[bytes]:
    """Return the ids of squashes, oldest first, without which the rest still leads between the same versions."""
    every = sorted(artifacts, key=lambda a: (a.version, a.base is None), reverse=True)
    squashes, gone = _squashes(every), []
    left = {a.id: a for a in every if a.base is not None}
    for artifact in [a for a in reversed(every) if a.id in squashes]:
        rest = [a for a in left.values() if a.id != artifact.id]
        if _leads(artifact, rest):
            gone.append(artifact.id)
            del left[artifact.id]
    return gone


def _leads(squash: KeptArtifact, deltas: Iterable[KeptArtifact]) -> bool:
    """Whether ``deltas`` lead from the squash's base to its version."""
    reached = {squash.base}
    for delta in sorted(deltas, key=lambda a: a.version):  # A base is always older than its version.
        if delta.base in reached:
            reached.add(delta.version)
    return squash.version in reached


def _squashes(every: list[KeptArtifact]) -> set[bytes]:
    newest_base: dict[Version, Version] = {}
    for artifact in every:
        if artifact.base is not None:
            newest_base[artifact.version] = max(artifact.base, newest_base.get(artifact.version, artifact.base))
    return {a.id for a in every if a.base is not None and a.base < newest_base[a.version]}


def _newest_chain(every: list[KeptArtifact]) -> set[bytes]:
    """Return the newest version's chain: an anchor and the fewest deltas from it, or all connected deltas."""
    if not every:
        return set()
    leading_to: dict[Version, list[KeptArtifact]] = {}
    for artifact in every:
        leading_to.setdefault(artifact.version, []).append(artifact)
    at = every[0].version
    onward: dict[Version, KeptArtifact | None] = {at: None}
    """Version → the first artifact on the shortest path from there to the newest version."""
    queue = deque([at])
    found: set[bytes] = set()
    while queue:
        at = queue.popleft()
        for artifact in leading_to.get(at, []):
            if artifact.base is None:
                found = {artifact.id}
                queue.clear()
                break
            if artifact.base not in onward:
                onward[artifact.base] = artifact
                queue.append(artifact.base)
    while (link := onward[at]) is not None:
        found.add(link.id)
        at = link.version
    return found
