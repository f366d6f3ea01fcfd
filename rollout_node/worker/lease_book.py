"""The leases of one worker: how many more it may take, what it reports, which plays it ends. Pure.

Promises:

- No more leases than slots run, or wait with a result that the ledger has not taken.
- A lease is reported from the moment it came until its play has ended.
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
        """Leases that fit in besides those that run, and those whose results wait."""
        return max(0, self._slots - len(self._running) - len(self._waiting))

    @property
    def running(self) -> list[bytes]:
        return list(self._running)

    def add(self, leases: Iterable[bytes]) -> list[bytes]:
        """Leases that came. Returns those to play; the others are to be given back."""
        taken = []
        for lease in leases:
            if self.free and lease not in self._running:
                self._running[lease] = _Running()
                taken.append(lease)
        return taken

    def sampled(self, lease: bytes, count: int) -> None:
        """``count`` more tokens of a lease have come."""
        if (running := self._running.get(lease)) is not None:
            running.tokens += count

    def end(self, lease: bytes) -> bool:
        """A lease's play has ended. Returns whether it may still be handed in or given back."""
        running = self._running.pop(lease, None)
        return running is not None and not running.aborted

    def result_waits(self, lease: bytes) -> None:
        """A lease that has ended has a result, which the ledger has not taken yet."""
        self._waiting.add(lease)

    def results_left(self, leases: Iterable[bytes]) -> None:
        """The ledger has judged or refused the results of these leases."""
        self._waiting.difference_update(leases)

    def tokens(self) -> dict[bytes, int]:
        """Tokens so far, of each lease that is to be renewed."""
        return {lease: running.tokens for lease, running in self._running.items() if not running.aborted}

    def apply_states(self, states: Mapping[bytes, str]) -> list[bytes]:
        """The ledger's answer to a heartbeat. Returns leases whose plays end now.

        A lease that the ledger does not know plays on: its result may still be the first of its job.
        """
        ending = []
        for lease, state in states.items():
            running = self._running.get(lease)
            if state == "abort" and running is not None and not running.aborted:
                running.aborted = True
                ending.append(lease)
        return ending
