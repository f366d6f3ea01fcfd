"""Peers that send corrupt pieces, judged by the reports of their receivers.

Every peer verifies a piece before forwarding it, so a corrupt piece was corrupted by its sender. The receiver is the
only witness. After one witness's report, the blamed peer feeds no other peer for a while. After reports of two
witnesses, it feeds none for good.

A witness that blames many peers may have corrupted the pieces in its own memory. So a single witness can demote only a
few nodes at a time; its older blames expire, which allows new ones. A blame that a second witness confirms does not
count towards this limit, because the second witness has its own memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Final

FORGIVEN_S: Final = 600.0
"""Seconds from a single witness's last report until the blamed node may feed others again."""
WITNESSES: Final = 2
"""Number of witnesses whose blame is permanent."""
CREDIBLE: Final = 3
"""Most nodes that a single witness can demote at a time, and most permanent verdicts to which it can contribute."""


class Blame:
    """Reports of corrupt pieces, by witness. `now_s`: seconds of one monotonic clock. Peers have the planner's ids."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        """Witness → node → corrupt pieces in the last report that was believed."""
        self._believed: dict[str, dict[str, float]] = {}
        """Node → witness → time of its newest blame that was believed."""
        self._quarantined: set[str] = set()
        self._verdicts: Counter[str] = Counter()
        """Witness → number of permanent verdicts to which it contributed."""

    def record(self, witness: str, rows: Collection[tuple[str, int]], now_s: float) -> list[str]:
        """Record a witness's report and return the nodes that it newly blames. `rows`: (node, corrupt pieces so far). A
        blame that exceeds the witness's limit is ignored; a later report may repeat it.
        """
        counts = self._counts.setdefault(witness, {})
        anew = []
        for node, pieces in rows:
            if node != witness and pieces > counts.get(node, 0) and self._believes(witness, node, now_s):
                counts[node] = pieces
                self._believed.setdefault(node, {})[witness] = now_s
                self._judge(node)
                anew.append(node)
        return anew

    def _believes(self, witness: str, node: str, now_s: float) -> bool:
        alone = {
            other
            for other in self._counts[witness]
            if len(said := self._believed[other]) == 1 and now_s - said[witness] < FORGIVEN_S
        }
        return len(alone - {node}) < CREDIBLE or bool(self._believed.get(node, {}).keys() - {witness})

    def _judge(self, node: str) -> None:
        fresh = [witness for witness in self._believed[node] if self._verdicts[witness] < CREDIBLE]
        if node not in self._quarantined and len(fresh) >= WITNESSES:
            self._quarantined.add(node)
            self._verdicts.update(fresh)

    def witnesses(self, node: str) -> int:
        """Number of witnesses that have blamed the node and were believed."""
        return len(self._believed.get(node, ()))

    def quarantined(self, node: str) -> bool:
        return node in self._quarantined

    def demoted(self, now_s: float) -> frozenset[str]:
        """The nodes that must not feed other nodes."""
        return frozenset(
            node
            for node, said in self._believed.items()
            if node in self._quarantined or now_s - max(said.values()) < FORGIVEN_S
        )
