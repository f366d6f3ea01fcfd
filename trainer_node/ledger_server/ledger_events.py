"""Acts of the ledger become events: gathered for a second, so that no worker fills the ring of events.

Promise: each kind of event comes at most once a second for the same words: a worker, a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from p2pcast.daemon.events import Events

EMIT_S = 1.0
"""Interval in seconds at which events are emitted."""
FREEING = ("leases_expired", "groups_dropped")
"""Kinds after which there may be jobs for a request that waits."""


class LedgerEvents:
    """``silent_s``: time without a request after which a worker counts as lost."""

    def __init__(self, events: Events, silent_s: float) -> None:
        self._events, self._silent_s = events, silent_s
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._lost: dict[str, str] | None = None
        """Names by id; None before the first call."""

    def add(self, counts: Mapping[tuple[str, ...], int]) -> bool:
        """Counts of a kind with its words. Returns whether requests that wait may find jobs now."""
        self._counts.update(counts)
        return any(kind in FREEING for kind, *_ in counts)

    async def emit(self) -> None:
        counts, self._counts = self._counts, Counter()
        for (kind, *words), count in sorted(counts.items()):
            if kind == "leases_expired":
                self._events.emit("leases_expired", worker=words[0], leases=count)
            elif kind == "results_rejected":
                self._events.emit("results_rejected", worker=words[0], reason=words[1], results=count)
            else:
                self._events.emit("groups_dropped", groups=count, reason=words[0])

    def update_workers(self, workers: Collection[Mapping[str, Any]]) -> None:
        """Rows of all workers. Workers that were silent before the first call are not told of."""
        lost = {row["worker"]: row["name"] for row in workers if row["silent_s"] > self._silent_s}
        known = {row["worker"] for row in workers}
        before, self._lost = lost if self._lost is None else self._lost, lost
        for worker in lost.keys() - before.keys():
            self._events.emit("worker_lost", worker=lost[worker])
        for worker in before.keys() & known - lost.keys():
            self._events.emit("worker_back", worker=before[worker])
