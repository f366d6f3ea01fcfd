"""Tracks which of a mirror's objects may be corrupt and have to be read back and verified. It does no I/O.

Guarantees: an object that this process has written or verified is trusted until its tag changes. A changed tag makes it
suspect; so does a complaint from a follower, whatever the tag. A new process knows no tags, so it starts with the
deltas and the newest anchor as suspects. Older anchors, which are large and not needed, become suspect only after a
change or a complaint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2pcast.mirror.object_names import KEY, ListedObject, ReadyMarker, slice_of, tail_of
from p2pcast.relay.artifact_path import Edge

MAX_COMPLAINTS = 256
"""Limit on complaints waiting for verification."""
_NO_ARTIFACT = b""
"""Stands for an artifact id for the run's key, which belongs to no artifact."""


@dataclass(frozen=True, slots=True)
class SuspectObject:
    """``found``: the object in the last listing, if known. ``asked``: a follower complained; the tag proves nothing."""

    name: str
    found: ListedObject | None
    asked: bool = False


class SuspectObjects:
    def __init__(self) -> None:
        self._right: dict[str, str] = {}
        """Name → tag of the verified contents."""
        self._open: dict[bytes, dict[str, ListedObject]] = {}
        """Artifact → its suspect objects."""
        self._complaints: dict[str, None] = {}
        self._answered: set[str] = set()
        """Objects verified after a complaint; further complaints are ignored until the next listing."""

    def listed(self, listing: Iterable[ListedObject]) -> None:
        """Process a new listing of the mirror."""
        there = {found.name: found for found in listing}
        self._right = {name: tag for name, tag in self._right.items() if name in there}
        self._open = defaultdict(dict)
        self._answered.clear()
        for name, found in there.items():
            artifact = artifact_of(name)
            if artifact is not None and self._right.get(name) != _tag(found):
                self._open[artifact][name] = found

    def complain(self, names: Iterable[str]) -> None:
        """Make objects that a follower reports as wrong or missing suspect. Foreign names are ignored."""
        for name in names:
            known = artifact_of(name) is not None and name not in self._answered
            if known and len(self._complaints) < MAX_COMPLAINTS:
                self._complaints[name] = None

    def right(self, doubt: SuspectObject) -> None:
        """Note that the object was read and verified."""
        if doubt.asked:
            self._answered.add(doubt.name)
        self._settle(doubt.name, None if doubt.found is None else _tag(doubt.found))

    def wrote(self, name: str, tag: str | None) -> None:
        """Note that this process has just written the object."""
        self._settle(name, tag)

    def gone(self, names: Iterable[str]) -> None:
        """Note that these objects were removed, or are no longer needed."""
        for name in names:
            self._right.pop(name, None)
            self._settle(name, None)

    def next(self, ready: Mapping[bytes, Edge]) -> SuspectObject | None:
        """Return the next object to verify. ``ready``: artifacts that are complete both here and on the mirror."""
        for name in list(self._complaints):
            artifact = artifact_of(name)
            if artifact == _NO_ARTIFACT or artifact in ready:
                return SuspectObject(name, self._open.get(artifact or _NO_ARTIFACT, {}).get(name), asked=True)
            del self._complaints[name]
        if self._open.get(_NO_ARTIFACT):
            return SuspectObject(KEY, self._open[_NO_ARTIFACT][KEY])
        anchor = max((e.version for e in ready.values() if e.base is None), default=None)
        for edge in sorted((ready[a] for a in self._open if a in ready), key=lambda e: e.version, reverse=True):
            late = edge.base is None and edge.version != anchor
            for name, found in self._open[edge.artifact].items():
                if not late or name in self._right:
                    return SuspectObject(name, found)
        return None

    def _settle(self, name: str, tag: str | None) -> None:
        self._complaints.pop(name, None)
        artifact = artifact_of(name)
        if artifact is not None and artifact in self._open:
            self._open[artifact].pop(name, None)
            if not self._open[artifact]:
                del self._open[artifact]
        if tag is not None:
            self._right[name] = tag


def artifact_of(name: str) -> bytes | None:
    """Return the artifact of an object: ``_NO_ARTIFACT`` for the run's key, None for foreign names."""
    if name == KEY:
        return _NO_ARTIFACT
    marker, part = ReadyMarker.parse(name), slice_of(name)
    return marker.id if marker is not None else part[0] if part is not None else tail_of(name)


def _tag(found: ListedObject) -> str:
    """An object's tag, or its modification time if the store has no tags."""
    return found.tag or f"{found.modified_s}"
