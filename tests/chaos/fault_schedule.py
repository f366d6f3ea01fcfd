"""A seeded sequence of faults and repairs for the processes of a fleet. Drawing a fault does not inject it.

Promises: the same names, seed and limit give the same sequence. A disturbed process gets no second fault. At most
``most_disturbed`` processes are disturbed at once. ``repair_all`` repairs every disturbed process. No clock, no
processes.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

KILL, LEAVE, STOP, SLOW = "kill", "leave", "stop", "slow"
RESTORED, FRESH = "back", "anew"
FAULTS: Final = {
    KILL: "the process is killed",
    LEAVE: "the process is asked to end (SIGTERM)",
    STOP: "the process is frozen (SIGSTOP)",
    SLOW: "all traffic to and from the process has a tenth of its rate",
}
REPAIRS: Final = {
    RESTORED: "restarted with its stored state, thawed, or back at its full rate",
    FRESH: "restarted without stored state, as a new peer",
}
FRESH_SHARE: Final = 0.25
"""Share of ended processes that restart without stored state."""
REPAIR_SHARE: Final = 0.25
"""Probability of a repair while further faults are possible: as likely as each fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``what``: a key of FAULTS or REPAIRS. ``name``: the process."""

    what: str
    name: str


class FaultSchedule:
    """``lasting``: processes that always restart with their stored state."""

    def __init__(self, names: Sequence[str], seed: int, most_disturbed: int, lasting: Collection[str] = ()) -> None:
        self._names = list(names)
        self._draw = random.Random(seed)
        self._most_disturbed = most_disturbed
        self._lasting = lasting
        self.disturbed: dict[str, str] = {}
        """Disturbed process → its fault."""

    def next(self) -> Fault:
        """The next fault or repair, recorded as injected."""
        full = len(self.disturbed) >= min(self._most_disturbed, len(self._names))
        if full or (self.disturbed and self._draw.random() < REPAIR_SHARE):
            return self._repair(self._draw.choice(list(self.disturbed)))
        name = self._draw.choice([n for n in self._names if n not in self.disturbed])
        self.disturbed[name] = self._draw.choice(list(FAULTS))
        return Fault(self.disturbed[name], name)

    def repair_all(self) -> Iterator[Fault]:
        """Repairs of all disturbed processes."""
        for name in list(self.disturbed):
            yield self._repair(name)

    def _repair(self, name: str) -> Fault:
        ended = self.disturbed.pop(name) in (KILL, LEAVE) and name not in self._lasting
        return Fault(FRESH if ended and self._draw.random() < FRESH_SHARE else RESTORED, name)
