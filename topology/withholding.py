"""Peers that do not forward sealed artifacts, judged by the reports of their children.

A waiting peer cannot know whether its parent withholds a version or is waiting for it too. So a peer reports only which
version it is missing and which parent feeds it. The hub gives all peers that miss the version time to report. Then it
blames a reported parent that has not itself reported the version as missing. It also blames a peer that repeatedly
misses versions while others wait below it: for whatever reason, that peer forwards nothing.

After one witness's blame, a node loses its place for a while; after blames by two witnesses over two artifacts, for as
long as the hub runs. A single witness can demote only a few nodes at a time (``topology.blame``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from topology.blame import FORGIVEN_S, Blame

GRACE_S: Final = 3.0
"""Seconds until a complaint is judged: the parent's own complaint about the version arrives within two reports."""
KEPT_S: Final = 120.0
"""Seconds for which a complaint is kept and excuses its sender."""
EXCUSES: Final = 3
"""A node is blamed once it has itself missed this many artifacts while others were waiting for it."""
INCIDENTS: Final = 2
"""Number of artifacts over which a node must be blamed, by two witnesses, for a permanent verdict: a single one may be
a fault of its machine.
"""


@dataclass(slots=True)
class _Complaint:
    parent: str | None
    since_s: float
    judged: bool = False


class Withholding:
    """Complaints about missing artifacts. Node ids are the planner's; ``now_s`` is one monotonic clock."""

    def __init__(self) -> None:
        self._complaints: dict[tuple[str, bytes], _Complaint] = {}
        """(witness, artifact) → the witness's first complaint."""
        self._excused: dict[str, set[bytes]] = {}
        """Node → artifacts that the node itself was missing while others waited for it."""
        self._incidents: dict[str, set[bytes]] = {}
        """Node → artifacts over which it was blamed."""
        self._counts: dict[tuple[str, str], int] = {}
        """(witness, node) → number of blames."""
        self._last_s: dict[str, float] = {}
        self._blame = Blame()

    def record(self, witness: str, rows: Iterable[tuple[bytes, str | None]], now_s: float) -> None:
        """Record a report. ``rows``: (artifact that the witness is missing, its parent, or None for the hub)."""
        for artifact, parent in rows:
            self._complaints.setdefault((witness, artifact), _Complaint(None if parent == witness else parent, now_s))

    def judge(self, now_s: float, here: Callable[[str], bool]) -> list[tuple[str, str]]:
        """Judge the complaints that are due and return (node, witness) for every new blame. ``here``: whether a node is
        still in the run.
        """
        out: list[tuple[str, str]] = []
        for (witness, artifact), complaint in list(self._complaints.items()):
            if now_s - complaint.since_s > KEPT_S:
                del self._complaints[witness, artifact]
            elif not complaint.judged and now_s - complaint.since_s >= GRACE_S:
                complaint.judged = True
                if (
                    complaint.parent is not None
                    and here(complaint.parent)
                    and self._blames(witness, complaint.parent, artifact, now_s)
                ):
                    out.append((complaint.parent, witness))
        return out

    def _blames(self, witness: str, node: str, artifact: bytes, now_s: float) -> bool:
        if (node, artifact) in self._complaints:
            excused = self._excused.setdefault(node, set())
            excused.add(artifact)
            if len(excused) < EXCUSES:
                return False
        count = self._counts[witness, node] = self._counts.get((witness, node), 0) + 1
        if not self._blame.record(witness, [(node, count)], now_s):
            return False
        self._incidents.setdefault(node, set()).add(artifact)
        self._last_s[node] = now_s
        return True

    def witnesses(self, node: str) -> int:
        """Number of witnesses that have blamed the node and were believed."""
        return self._blame.witnesses(node)

    def quarantined(self, node: str) -> bool:
        return self._blame.quarantined(node) and len(self._incidents.get(node, ())) >= INCIDENTS

    def demoted(self, now_s: float) -> frozenset[str]:
        """The nodes that must not feed other nodes."""
        return frozenset(
            node
            for node, last_s in self._last_s.items()
            if self.quarantined(node) or (self.witnesses(node) and now_s - last_s < FORGIVEN_S)
        )
