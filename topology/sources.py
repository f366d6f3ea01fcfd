"""Who pulls what from whom: the hub's knowledge of who holds which artifact, and the few that it names to one who lacks it.

Named are some that hold it whole, those first that serve the fewest, in the seeker's own region where that is equal; and some that are pulling it themselves, and will
have parts that the seeker lacks. So the hub's word costs the same whether ten hold an artifact or ten thousand, and load spreads by what has been handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final

WHOLE: Final = 5
"""Named to one seeker."""
PARTIAL: Final = 3
_LOOKED_AT: Final = 64
"""Holders that are compared for one answer. Whoever was named goes to the end of the line."""


class Sources:
    """Artifacts are named by whatever the caller likes, peers by the planner's ids."""

    def __init__(self) -> None:
        self._whole: dict[bytes, dict[str, None]] = {}
        self._parts: dict[bytes, dict[str, None]] = {}
        self._held: dict[str, set[bytes]] = {}
        self._named: dict[tuple[str, bytes], tuple[str, ...]] = {}
        """(seeker, artifact) → whom it was told of."""
        self._serves: Counter[str] = Counter()

    def holds(self, peer: str, held: Iterable[bytes], dropped: Iterable[bytes] = ()) -> None:
        """What has come to be held whole, and what is no longer."""
        mine = self._held.setdefault(peer, set())
        for artifact in held:
            mine.add(artifact)
            self._whole.setdefault(artifact, {})[peer] = None
            self._seeks_no_more(peer, artifact)
        for artifact in dropped:
            mine.discard(artifact)
            _remove(self._whole, artifact, peer)

    def gone(self, artifact: bytes) -> None:
        """Nobody is sent to anybody for it any more."""
        for peer in self._whole.pop(artifact, ()):
            self._held[peer].discard(artifact)
        for seeker in self._parts.pop(artifact, ()):
            self._forget(seeker, artifact)

    def left(self, peer: str) -> None:
        for artifact in self._held.pop(peer, ()):
            _remove(self._whole, artifact, peer)
        for artifact in [a for a, peers in self._parts.items() if peer in peers]:
            self._seeks_no_more(peer, artifact)
        self._serves.pop(peer, None)

    def seek(
        self, seeker: str, artifact: bytes, without: Collection[str] = (), near: Callable[[str], bool] = lambda peer: True
    ) -> list[str]:
        """Whom to ask: none of ``without``. ``near``: whether a peer is in the seeker's region."""
        self._forget(seeker, artifact)

        def best(peers: dict[str, None], most: int) -> list[str]:
            able = list(islice((p for p in peers if p != seeker and p not in without), _LOOKED_AT))
            able.sort(key=lambda p: (self._serves[p], not near(p)))
            for peer in able[:most]:
                del peers[peer]
                peers[peer] = None
            return able[:most]

        found = best(self._whole.get(artifact, {}), WHOLE) + best(self._parts.setdefault(artifact, {}), PARTIAL)
        self._parts[artifact][seeker] = None
        self._named[seeker, artifact] = tuple(found)
        self._serves.update(found)
        return found

    def serves(self, peer: str) -> int:
        """How many were told of it and are not done."""
        return self._serves[peer]

    def _seeks_no_more(self, seeker: str, artifact: bytes) -> None:
        self._forget(seeker, artifact)
        _remove(self._parts, artifact, seeker)

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
