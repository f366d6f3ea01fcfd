"""Plans uploads to a mirror and removals from it. It does no I/O.

Guarantees: the first uploads complete a path of artifacts from nothing to the newest version, choosing the path with
the fewest bytes to upload. The other artifacts follow, newest first. Removals never break the path to the newest
complete version on the mirror, and never touch foreign objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pcast.ground.version import Version
from p2pcast.mirror.object_names import (
    KEY,
    SLICE_BYTES,
    ListedObject,
    ReadyMarker,
    slice_bytes,
    slice_name,
    slice_of,
    slices,
    tail_name,
    tail_of,
)
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.store.retention import DEFAULT, RetentionCounts, expendable

LEFT_OVER_S = 3600.0
"""Age in seconds at which parts of incomplete artifacts are removed if this hub no longer has the artifact. The age is
relative to the newest object, by the store's clock. Younger parts may become complete in a later listing.
"""
_FREE = 1
"""Cost of an artifact already on the mirror; it is above 0, so that the shorter of two such paths wins."""


@dataclass(slots=True)
class Inventory:
    """The known contents of a mirror."""

    keyed: bool = False
    """Whether the run's public key is on the mirror."""
    markers: dict[bytes, ReadyMarker] = field(default_factory=dict)
    tails: dict[bytes, float] = field(default_factory=dict)
    """Artifact → modification time in Unix seconds, by the store's clock."""
    parts: dict[bytes, dict[int, tuple[int, float]]] = field(default_factory=dict)
    """Artifact → slice number → size in bytes, modification time."""
    newest_s: float = 0.0
    _held: dict[bytes, int] = field(default_factory=dict)
    """Artifact → bytes in its slices."""

    @classmethod
    def of(cls, listing: Iterable[ListedObject]) -> Inventory:
        out = cls()
        for found in listing:
            marker, tail, part = ReadyMarker.parse(found.name), tail_of(found.name), slice_of(found.name)
            out.keyed = out.keyed or found.name == KEY
            if marker is not None:
                out.markers[marker.id] = marker
            elif tail is not None:
                out.tails[tail] = found.modified_s
            elif part is not None:
                out._put(part[0], part[1], found.size, found.modified_s)
            out.newest_s = max(out.newest_s, found.modified_s)
        return out

    def missing(self, edge: Edge) -> list[int]:
        """Numbers of the artifact's slices that are missing or have the wrong size."""
        have = self.parts.get(edge.artifact, {})
        return [n for n in range(slices(edge.bytes)) if n not in have or have[n][0] != slice_bytes(edge.bytes, n)]

    def missing_bytes(self, edge: Edge) -> int:
        return max(0, edge.bytes - self._held.get(edge.artifact, 0))

    def whole(self, edge: Edge) -> bool:
        """Whether no slice is missing."""
        have = self.parts.get(edge.artifact, {})
        # A fast check first, because a 140 GB state has 17 000 slices and this is called often.
        return (len(have), self._held.get(edge.artifact, 0)) == (slices(edge.bytes), edge.bytes) or not self.missing(
            edge
        )

    def wrote_slice(self, artifact: bytes, number: int, size: int) -> None:
        self._put(artifact, number, size, self.newest_s)

    def _put(self, artifact: bytes, number: int, size: int, when_s: float) -> None:
        parts = self.parts.setdefault(artifact, {})
        self._held[artifact] = self._held.get(artifact, 0) + size - parts.get(number, (0, 0.0))[0]
        parts[number] = (size, when_s)

    def wrote_tail(self, artifact: bytes) -> None:
        self.tails[artifact] = self.newest_s

    def wrote_marker(self, marker: ReadyMarker) -> None:
        self.markers[marker.id] = marker

    def ready(self, here: Mapping[bytes, Edge]) -> dict[bytes, ReadyMarker]:
        """Return the complete artifacts. If an artifact is also here, all its slices must be listed; otherwise its
        marker suffices.
        """
        return {
            a: m
            for a, m in self.markers.items()
            if a in self.tails and (self.whole(here[a]) if a in here else bool(self.parts.get(a)))
        }

    def gone(self, names: Iterable[str]) -> None:
        """Note that these objects were removed."""
        for name in names:
            marker, tail, part = ReadyMarker.parse(name), tail_of(name), slice_of(name)
            if marker is not None:
                self.markers.pop(marker.id, None)
            elif tail is not None:
                self.tails.pop(tail, None)
            elif part is not None:
                parts = self.parts.get(part[0], {})
                size, _ = parts.pop(part[1], (0, 0.0))
                self._held[part[0]] = self._held.get(part[0], 0) - size
                if not parts:
                    # Free the entry: many more artifacts pass through a run than exist at any time.
                    self.parts.pop(part[0], None)
                    del self._held[part[0]]


def uploads(here: Mapping[bytes, Edge], mirror: Inventory, counts: RetentionCounts = DEFAULT) -> list[Edge]:
    """Return the artifacts missing from the mirror, in the order of upload."""
    ready = mirror.ready(here)
    there = [Edge(m.id, m.base, m.version, _FREE) for m in ready.values()]
    late = _expendable(here, ready, counts)
    lacking = [e for a, e in here.items() if a not in ready and a not in late]
    costs = [Edge(e.artifact, e.base, e.version, _FREE + mirror.missing_bytes(e)) for e in lacking]
    way = [here[e.artifact] for e in cheapest_path(None, [*there, *costs]) if e.artifact not in ready]
    first = {e.artifact for e in way}
    return way + sorted(
        (e for e in lacking if e.artifact not in first), key=lambda e: (e.version, e.base is None), reverse=True
    )


def head(here: Mapping[bytes, Edge], mirror: Inventory) -> Version | None:
    """Return the newest version to which the mirror's artifacts lead from nothing."""
    way = cheapest_path(None, [Edge(m.id, m.base, m.version, _FREE) for m in mirror.ready(here).values()])
    return way[-1].version if way else None


def removals(here: Mapping[bytes, Edge], mirror: Inventory, counts: RetentionCounts = DEFAULT) -> list[str]:
    """Return the names of objects to remove, in this order: an artifact's marker before its parts."""
    ready = mirror.ready(here)
    names: list[str] = []
    late = _expendable(here, ready, counts)
    for artifact in expendable(ready.values(), counts):
        if artifact in here and artifact not in late:
            continue  # otherwise it would be uploaded and removed in turns
        names += [str(mirror.markers[artifact]), *_parts(artifact, mirror)]
    for artifact in mirror.parts.keys() | mirror.tails.keys():
        if (
            artifact not in mirror.markers
            and artifact not in here
            and mirror.newest_s - _touched(artifact, mirror) > LEFT_OVER_S
        ):
            names += _parts(artifact, mirror)
    return names


def _expendable(here: Mapping[bytes, Edge], ready: Mapping[bytes, ReadyMarker], counts: RetentionCounts) -> set[bytes]:
    """Artifacts, here or on the mirror, that retention would not keep and that are not worth uploading."""
    every = {**{a: ReadyMarker(e.version, e.base, a) for a, e in here.items()}, **ready}
    return set(expendable(every.values(), counts))


def _parts(artifact: bytes, mirror: Inventory) -> list[str]:
    tail = [tail_name(artifact)] if artifact in mirror.tails else []
    return tail + [slice_name(artifact, n) for n in sorted(mirror.parts.get(artifact, {}))]


def _touched(artifact: bytes, mirror: Inventory) -> float:
    return max((mirror.tails.get(artifact, 0.0), *(when for _, when in mirror.parts.get(artifact, {}).values())))


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Pieces ``first`` to ``stop`` (exclusive): ``size`` bytes from offset ``start`` of slice ``number``."""

    number: int
    start: int
    size: int
    first: int
    stop: int


def spans(missing: Iterable[int], piece_bytes: int, log_bytes: int, most_bytes: int) -> list[PieceSpan]:
    """Return ranges that cover the ``missing`` pieces (ascending). Neighbours are joined. Each range lies within a
    slice and has at most ``most_bytes``, but at least one piece.
    """
    out: list[PieceSpan] = []
    for piece in missing:
        offset = piece * piece_bytes
        size = min(piece_bytes, log_bytes - offset)
        number, start = divmod(offset, SLICE_BYTES)
        last = out[-1] if out else None
        if last is not None and (last.number, last.stop) == (number, piece) and last.size + size <= most_bytes:
            out[-1] = PieceSpan(number, last.start, last.size + size, last.first, piece + 1)
        else:
            out.append(PieceSpan(number, start, size, piece, piece + 1))
    return out
