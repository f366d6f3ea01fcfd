"""One worker's leases: how many more it may take, what it reports, and which plays it stops. It does no I/O.

Guarantees:

- Leases whose plays run, or whose results the ledger has not taken, never outnumber the slots.
- A lease is reported from its arrival until its play has ended.
- A lease that is both finished and aborted counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _Running:
    tokens: int = 0
    aborted: bool = False


class LeaseBook:
    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._running: dict[bytes, _Running] = {}
        self._waiting: set[bytes] = set()
        """Leases whose results the ledger has not taken yet."""

    @property
    def free(self) -> int:
        """Number of further leases that the worker may take."""
        return max(0, self._slots - len(self._running) - len(self._waiting))

    @property
    def running(self) -> list[bytes]:
        return list(self._running)

    def add(self, leases: Iterable[bytes]) -> list[bytes]:
        """Add new leases. Returns those to play; the caller must give back the others."""
        taken = []
        for lease in leases:
            if self.free and lease not in self._running:
                self._running[lease] = _Running()
                taken.append(lease)
        return taken

    def sampled(self, lease: bytes, count: int) -> None:
        """Count ``count`` more sampled tokens of a lease."""
        if (running := self._running.get(lease)) is not None:
            running.tokens += count

    def end(self, lease: bytes) -> bool:
        """Remove a lease whose play has ended. Returns whether it may still be handed in or given back."""
        running = self._running.pop(lease, None)
        return running is not None and not running.aborted

    def result_waits(self, lease: bytes) -> None:
        """Note that a finished lease has a result that the ledger has not taken yet."""
        self._waiting.add(lease)

    def results_left(self, leases: Iterable[bytes]) -> None:
        """Note that the ledger has judged or refused the results of these leases."""
        self._waiting.difference_update(leases)

    def tokens(self) -> dict[bytes, int]:
        """Tokens so far for each lease that is to be renewed."""
        return {lease: running.tokens for lease, running in self._running.items() if not running.aborted}

    def apply_states(self, states: Mapping[bytes, str]) -> list[bytes]:
        """Apply the ledger's answer to a heartbeat. Returns the leases whose plays must stop now.

        The play of a lease unknown to the ledger continues, because its result may still be the job's first.
        """
        ending = []
        for lease, state in states.items():
            running = self._running.get(lease)
            if state == "abort" and running is not None and not running.aborted:
                running.aborted = True
                ending.append(lease)
        return ending
