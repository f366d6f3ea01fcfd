"""Peers that send corrupt pieces, judged by the reports of their receivers.

Every peer verifies a piece before forwarding it, so a corrupt piece was corrupted by its sender. The receiver is the
only witness. After one witness's report, the blamed peer feeds no other peer for a while. After reports of two
witnesses, it feeds none for good. A witness that blames many peers has probably corrupted the pieces itself, in its own
memory; its reports no longer count.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

FORGIVEN_S: Final = 600.0
"""Seconds after the last report of a single witness until the blamed node may feed others again."""
WITNESSES: Final = 2
"""Number of witnesses whose blame is permanent."""
CREDIBLE: Final = 3
"""Most nodes that a credible witness may blame; a witness that blames more is itself the likely cause."""


class Blame:
    """Reports of corrupt pieces, by witness. `now_s`: seconds of one monotonic clock. Peers have the planner's ids."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        """Witness → node → corrupt pieces, by the last report."""
        self._last_s: dict[str, float] = {}
        """Node → time of its newest blame."""

    def record(self, witness: str, rows: Collection[tuple[str, int]], now_s: float) -> list[str]:
        """Take a report. `rows`: (node, corrupt pieces so far). Returns the nodes newly blamed by a credible
        witness.
        """
        counts = self._counts.setdefault(witness, {})
        if len(counts) > CREDIBLE:
            return []  # not recorded either: the witness is not credible
        anew = [node for node, pieces in rows if node != witness and pieces > counts.get(node, 0)]
        counts.update((node, pieces) for node, pieces in rows if node in anew)
        if len(counts) > CREDIBLE:
            return []
        self._last_s.update((node, now_s) for node in anew)
        return anew

    def witnesses(self, node: str) -> int:
        """Number of credible witnesses that blame the node."""
        return sum(node in counts for counts in self._counts.values() if len(counts) <= CREDIBLE)

    def quarantined(self, node: str) -> bool:
        return self.witnesses(node) >= WITNESSES

    def demoted(self, now_s: float) -> frozenset[str]:
        """Nodes that must feed no other node."""
        return frozenset(
            node
            for node, last_s in self._last_s.items()
            if (count := self.witnesses(node)) >= WITNESSES or (count and now_s - last_s < FORGIVEN_S)
        )
