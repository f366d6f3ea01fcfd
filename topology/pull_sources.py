"""Sources for pulling: which peers have which artifact, and the few that the hub gives to a peer that needs it.

The hub gives a seeker some peers that have the whole artifact: those that serve the fewest seekers first and, among
equals, those in the seeker's region. It adds some peers that are pulling the artifact and will have parts of it. So an
answer has the same size for ten holders and for ten thousand, and the load is spread by the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final

WHOLE: Final = 5
"""Most peers with the whole artifact in one answer."""
PARTIAL: Final = 3
"""Most peers with parts of the artifact in one answer."""
MOST_HELD: Final = 4096
"""Most artifacts recorded for one peer: forty times what a peer keeps. Further ones are ignored."""
MOST_SOUGHT: Final = 1024
"""Most artifacts that one peer may seek at a time; beyond that, the oldest is forgotten."""
_MAX_CANDIDATES: Final = 64
"""Most holders compared for one answer. A peer in an answer moves to the end of the queue."""


class PullSources:
    """Holders and seekers of artifacts. The caller chooses the artifacts' ids; peers have the planner's ids."""

    def __init__(self) -> None:
        self._whole: dict[bytes, dict[str, None]] = {}
        self._parts: dict[bytes, dict[str, None]] = {}
        self._held: dict[str, set[bytes]] = {}
        self._named: dict[tuple[str, bytes], tuple[str, ...]] = {}
        """(seeker, artifact) → peers given to the seeker."""
        self._serves: Counter[str] = Counter()
        self._sought: dict[str, dict[bytes, None]] = {}
        """Seeker → artifacts that it seeks, oldest first."""

    def holds(self, peer: str, held: Iterable[bytes], dropped: Iterable[bytes] = ()) -> None:
        """Record the artifacts that a peer now has whole, and those that it has dropped."""
        mine = self._held.setdefault(peer, set())
        for artifact in held:
            if len(mine) >= MOST_HELD and artifact not in mine:
                continue
            mine.add(artifact)
            self._whole.setdefault(artifact, {})[peer] = None
            self._seeks_no_more(peer, artifact)
        for artifact in dropped:
            mine.discard(artifact)
            _remove(self._whole, artifact, peer)

    def gone(self, artifact: bytes) -> None:
        """Forget an artifact: no answer contains peers for it any more."""
        for peer in self._whole.pop(artifact, ()):
            self._held[peer].discard(artifact)
        for seeker in list(self._parts.get(artifact, ())):
            self._seeks_no_more(seeker, artifact)

    def left(self, peer: str) -> None:
        for artifact in self._held.pop(peer, ()):
            _remove(self._whole, artifact, peer)
        for artifact in list(self._sought.get(peer, ())):
            self._seeks_no_more(peer, artifact)
        self._serves.pop(peer, None)

    def seek(
        self,
        seeker: str,
        artifact: bytes,
        without: Collection[str] = (),
        near: Callable[[str], bool] = lambda peer: True,
    ) -> list[str]:
        """Record a seeker and return its sources, none of them in ``without``. ``near``: whether a peer is in its
        region.
        """
        self._forget(seeker, artifact)

        def best(peers: dict[str, None], most: int) -> list[str]:
            able = list(islice((p for p in peers if p != seeker and p not in without), _MAX_CANDIDATES))
            able.sort(key=lambda p: (self._serves[p], not near(p)))
            for peer in able[:most]:
                del peers[peer]
                peers[peer] = None
            return able[:most]

        found = best(self._whole.get(artifact, {}), WHOLE) + best(self._parts.setdefault(artifact, {}), PARTIAL)
        self._parts[artifact][seeker] = None
        self._named[seeker, artifact] = tuple(found)
        self._serves.update(found)
        sought = self._sought.setdefault(seeker, {})
        sought.pop(artifact, None)
        sought[artifact] = None
        if len(sought) > MOST_SOUGHT:
            self._seeks_no_more(seeker, next(iter(sought)))
        return found

    def serves(self, peer: str) -> int:
        """Return the number of seekers that were given this peer as a source and have not finished."""
        return self._serves[peer]

    def _seeks_no_more(self, seeker: str, artifact: bytes) -> None:
        self._forget(seeker, artifact)
        _remove(self._parts, artifact, seeker)
        if (sought := self._sought.get(seeker)) is not None:
            sought.pop(artifact, None)
            if not sought:
                del self._sought[seeker]

    def _forget(self, seeker: str, artifact: bytes) -> None:
        for peer in self._named.pop((seeker, artifact), ()):
            if self._serves[peer] > 1:
                self._serves[peer] -= 1
            else:
                del self._serves[peer]


def _remove(table: dict[bytes, dict[str, None]], artifact: bytes, peer: str) -> None:
    if (peers := table.get(artifact)) is not None:
        peers.pop(peer, None)
        if not peers:
            del table[artifact]
