"""Decides whether the wall clock can be trusted to delete records by age. Pure: times are arguments, in seconds.

Guarantee: a clock that is wrong for a while deletes no record that would live by the right clock. A clock is trusted
while it runs as a steady clock does. After a jump it is trusted again once it has come back, or has run for
``SETTLE_S`` without another jump. So is the clock of a process that starts far from the newest time in its records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

JUMP_S: Final = 60.0
"""A wall clock that moves by more than this against a steady clock has jumped; NTP moves it in smaller steps."""
SETTLE_S: Final = 86_400.0
"""Seconds that an operator has to correct a wrong clock before records are deleted by it."""
AWAY_S: Final = 7 * 86_400.0
"""A process may have been down for so long before its clock is doubted."""


@dataclass(frozen=True, slots=True)
class Jump:
    """``expected``: Unix time by the steady clock; ``shown``: by the wall clock."""

    expected: float
    shown: float


class ClockWatch:
    def __init__(self, wall_s: float, steady_s: float, known_s: float | None) -> None:
        """``known_s``: newest time in the records of earlier processes; None where there is none."""
        self._offset = wall_s - steady_s
        self._since = steady_s
        doubted = known_s is not None and not -JUMP_S <= wall_s - known_s <= AWAY_S
        self._trusted = None if doubted else self._offset

    def observe(self, wall_s: float, steady_s: float) -> Jump | None:
        """Record the clocks and return the jump since the last call, if there was one."""
        offset, before = wall_s - steady_s, self._offset
        self._offset = offset
        jump = None
        if abs(offset - before) > JUMP_S:
            self._since = steady_s
            jump = Jump(before + steady_s, wall_s)
        if self.settled or steady_s - self._since >= SETTLE_S:
            self._trusted = offset
        return jump

    @property
    def settled(self) -> bool:
        return self._trusted is not None and abs(self._offset - self._trusted) <= JUMP_S
