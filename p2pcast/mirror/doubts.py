"""Which objects of a mirror may hold something else than they should. Pure.

Promises: what this process wrote, or read and found right, is believed for as long as the store calls it by the same tag; what it calls by another tag is doubted,
and so is what a follower complains of, whatever its tag. A process that has just begun knows no tags: it doubts deltas and the newest anchor; older ones, which may
be large and which nobody needs while there is a newer one, only when they change or somebody complains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2pcast.mirror.names import KEY, Found, Marker, slice_of, tail_of
from p2pcast.relay.catchup import Edge

MAX_COMPLAINTS = 256
"""That wait to be looked at."""
_NOBODY = b""
"""What belongs to no artifact: the run's key."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """``found``: what the last list said of it, None where that is not known; ``asked``: somebody complained, so its tag proves nothing."""

    name: str
    found: Found | None
    asked: bool = False


class Doubts:
    def __init__(self) -> None:
        self._right: dict[str, str] = {}
        """Name → the tag under which it is believed."""
        self._open: dict[bytes, dict[str, Found]] = {}
        """Artifact → its objects that are doubted."""
        self._complaints: dict[str, None] = {}
        self._answered: set[str] = set()
        """Complaints about these were wrong; until the next list they are not heard again."""

    def listed(self, listing: Iterable[Found]) -> None:
        """What is there, anew."""
        there = {found.name: found for found in listing}
        self._right = {name: tag for name, tag in self._right.items() if name in there}
        self._open = defaultdict(dict)
        self._answered.clear()
        for name, found in there.items():
            artifact = artifact_of(name)
            if artifact is not None and self._right.get(name) != _tag(found):
                self._open[artifact][name] = found

    def complain(self, names: Iterable[str]) -> None:
        """A follower found these wrong, or not there. That is looked into, no more; what is not ours is no complaint."""
        for name in names:
            known = artifact_of(name) is not None and name not in self._answered
            if known and len(self._complaints) < MAX_COMPLAINTS:
                self._complaints[name] = None

    def right(self, doubt: Doubt) -> None:
        """It was read, and is what it should be."""
        if doubt.asked:
            self._answered.add(doubt.name)
        self._settle(doubt.name, None if doubt.found is None else _tag(doubt.found))

    def wrote(self, name: str, tag: str | None) -> None:
        """This process put it there just now."""
        self._settle(name, tag)

    def gone(self, names: Iterable[str]) -> None:
        """These were removed, or are no longer anybody's business here."""
        for name in names:
            self._right.pop(name, None)
            self._settle(name, None)

    def next(self, ready: Mapping[bytes, Edge]) -> Doubt | None:
        """What to look at first. ``ready``: what is whole here and there."""
        for name in list(self._complaints):
            artifact = artifact_of(name)
            if artifact == _NOBODY or artifact in ready:
                return Doubt(name, self._open.get(artifact or _NOBODY, {}).get(name), asked=True)
            del self._complaints[name]
        if self._open.get(_NOBODY):
            return Doubt(KEY, self._open[_NOBODY][KEY])
        anchor = max((e.version for e in ready.values() if e.base is None), default=None)
        for edge in sorted((ready[a] for a in self._open if a in ready), key=lambda e: e.version, reverse=True):
            late = edge.base is None and edge.version != anchor
            for name, found in self._open[edge.artifact].items():
                if not late or name in self._right:
                    return Doubt(name, found)
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
    """To which artifact an object belongs; None where it is not ours, nothing for what belongs to all."""
    if name == KEY:
        return _NOBODY
    marker, part = Marker.parse(name), slice_of(name)
    return marker.id if marker is not None else part[0] if part is not None else tail_of(name)


def _tag(found: Found) -> str:
    """When it was written, where a store has no tags."""
    return found.tag or f"{found.modified_s}"
