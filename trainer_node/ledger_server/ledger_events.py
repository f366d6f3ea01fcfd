"""Acts of the ledger become events: gathered for a second, so that no worker fills the ring of events.

Guarantee: each kind of event comes at most once a second for the same words: a worker, a reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

from p2pcast.process.events import Events

EMIT_S = 1.0
"""Interval in seconds at which events are emitted."""
MAX_NAMED = 32
"""Faulty prompts that are named in one interval; further ones are counted."""
NEWEST = 8
"""Rejected jobs that /status names."""
FREEING = ("leases_expired", "groups_dropped")
"""Kinds after which there may be jobs for a request that waits."""


class LedgerEvents:
    """``silent_s``: time without a request after which a worker counts as lost."""

    def __init__(self, events: Events, silent_s: float) -> None:
        self._events, self._silent_s = events, silent_s
        self._counts: Counter[tuple[str, ...]] = Counter()
        self.returned: Counter[str] = Counter()
        """Leases that came back, by reason, since the start."""
        self.newest_rejected: deque[dict[str, str]] = deque(maxlen=NEWEST)
        self._lost: dict[str, str] | None = None
        """Names by id; None before the first call."""

    def add(self, counts: Mapping[tuple[str, ...], int]) -> bool:
        """Counts of a kind with its words. Returns whether requests that wait may find jobs now."""
        self._counts.update(counts)
        for (kind, *words), count in counts.items():
            if kind == "leases_returned":
                self.returned[words[1]] += count
            elif kind == "job_rejected":
                self.newest_rejected.append(dict(zip(("prompt", "reason", "why"), words, strict=True)))
        return any(kind in FREEING for kind, *_ in counts)

    async def emit(self) -> None:
        counts, self._counts = self._counts, Counter()
        faulty = [act for act in counts if act[0] == "prompt_rejected"]
        for act in faulty:
            del counts[act]
        for _, prompt, why in faulty[:MAX_NAMED]:
            self._events.emit("prompt_rejected", prompt=prompt, why=why)
        if len(faulty) > MAX_NAMED:
            self._events.emit("prompt_rejected", prompt=f"{len(faulty) - MAX_NAMED} more", why="within the same second")
        for (kind, *words), count in sorted(counts.items()):
            if kind == "leases_expired":
                self._events.emit("leases_expired", worker=words[0], leases=count)
            elif kind == "leases_returned":
                self._events.emit("leases_returned", worker=words[0], reason=words[1], leases=count)
            elif kind == "job_rejected":
                self._events.emit("job_rejected", prompt=words[0], reason=words[1], why=words[2], jobs=count)
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
