"""What befalls a fleet, second after second: who is killed, leaves, is frozen, slows down, or comes back. Drawn from a seeded generator; it does nothing itself.

Promises: the same names, seed and cap give the same storm; nobody is struck who is out of order already; at most ``most_out`` are out of order at once; ``calm``
brings back whoever is out. No clock, no processes.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

KILL, LEAVE, STOP, SLOW = "kill", "leave", "stop", "slow"
BACK, ANEW = "back", "anew"
BLOWS: Final = {
    KILL: "the process is killed",
    LEAVE: "it is asked to end (SIGTERM)",
    STOP: "it is frozen (SIGSTOP)",
    SLOW: "every way to it and from it has a tenth of its rate",
}
MENDED: Final = {
    BACK: "started with the state that it had, thawed, or at its rate again",
    ANEW: "started without any state, as a newcomer",
}
ANEW_SHARE: Final = 0.25
"""Of those whose process has ended: they come back as newcomers."""
BACK_SHARE: Final = 0.25
"""Of the events, while somebody is out and more may be: as likely as each blow."""


@dataclass(frozen=True, slots=True)
class Blow:
    """``what`` befalls ``name``; one of BLOWS or MENDED."""

    what: str
    name: str


class Storm:
    """``lasting``: those who never come back as newcomers."""

    def __init__(self, names: Sequence[str], seed: int, most_out: int, lasting: Collection[str] = ()) -> None:
        self._names = list(names)
        self._draw = random.Random(seed)
        self._most_out = most_out
        self._lasting = lasting
        self.out: dict[str, str] = {}
        """Who is out of order, and by what."""

    def next(self) -> Blow:
        """What happens next; it counts as having happened."""
        full = len(self.out) >= min(self._most_out, len(self._names))
        if full or (self.out and self._draw.random() < BACK_SHARE):
            return self._mend(self._draw.choice(list(self.out)))
        name = self._draw.choice([n for n in self._names if n not in self.out])
        self.out[name] = self._draw.choice(list(BLOWS))
        return Blow(self.out[name], name)

    def calm(self) -> Iterator[Blow]:
        """Everybody comes back."""
        for name in list(self.out):
            yield self._mend(name)

    def _mend(self, name: str) -> Blow:
        ended = self.out.pop(name) in (KILL, LEAVE) and name not in self._lasting
        return Blow(ANEW if ended and self._draw.random() < ANEW_SHARE else BACK, name)
