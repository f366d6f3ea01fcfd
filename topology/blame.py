"""Who sends what does not match its hash, by the word of those who received it.

A piece is checked before it is passed on, so its sender is the one that spoilt it, and the receiver is the one witness. One witness is believed as far as costs little: whom it
blames feeds nobody for a while. Two are believed for good. But one that blames everybody in turn has spoilt the pieces itself, most likely in its own memory,
and its word counts no more.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

FORGIVEN_S: Final = 600.0
"""After the last word of a single witness."""
WITNESSES: Final = 2
"""For good."""
CREDIBLE: Final = 3
"""Nodes that one witness may blame; with more it is taken for the culprit."""


class Blame:
    """`now_s`: one monotonic clock. Peers are named by the planner's ids."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        """Witness → node → pieces, by its last word."""
        self._last_s: dict[str, float] = {}
        """Node → when it was last blamed anew."""

    def heard(self, witness: str, rows: Collection[tuple[str, int]], now_s: float) -> list[str]:
        """`rows`: (node, pieces so far). Those that have been blamed anew by one who is believed."""
        counts = self._counts.setdefault(witness, {})
        if len(counts) > CREDIBLE:
            return []  # nothing is kept of the word of such a witness, either
        anew = [node for node, pieces in rows if node != witness and pieces > counts.get(node, 0)]
        counts.update((node, pieces) for node, pieces in rows if node in anew)
        if len(counts) > CREDIBLE:
            return []
        self._last_s.update((node, now_s) for node in anew)
        return anew

    def witnesses(self, node: str) -> int:
        """How many of those who are believed blame it."""
        return sum(node in counts for counts in self._counts.values() if len(counts) <= CREDIBLE)

    def quarantined(self, node: str) -> bool:
        return self.witnesses(node) >= WITNESSES

    def muted(self, now_s: float) -> frozenset[str]:
        """Those who are to feed nobody."""
        return frozenset(
            node
            for node, last_s in self._last_s.items()
            if (count := self.witnesses(node)) >= WITNESSES or (count and now_s - last_s < FORGIVEN_S)
        )
