"""When a child leaves its parent (docs/wire-protocol.md, section 5; design target: bytes flow again within a second). Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

ALIVE_ACTIVE_S = 0.05
"""Between keepalives while a transfer runs."""
ALIVE_IDLE_S = 1.0
SILENCE_FLOOR_S = 0.25
"""Below this a pause is scheduling, not death."""
IDLE_SILENCE_S = 5.0
STALL_FLOOR_S = 1.0
"""A parent that is ahead and sends keepalives alone for this long does not do its work."""
JITTER_FACTOR = 4.0
"""Silence is measured against the link's own habit: this many times the longest recent gap between signs of life."""
JITTER_DECAY = 0.98
LATE_S = 0.1
"""A look that comes this much later than planned means that our own loop stood still; the time it missed does not count."""


class Verdict(Enum):
    STAY = "stay"
    SILENT = "silent"
    STALLED = "ahead but not sending"


@dataclass(slots=True)
class ParentWatch:
    """What a child has seen of its parent. Times in seconds of one monotonic clock."""

    heard_at: float
    """Last byte of any kind."""
    paid_at: float
    """Last payload byte."""
    looked_at: float
    rtt_s: float | None = None
    gap_s: float = 0.0
    """Longest recent gap between signs of life while a transfer ran, decaying."""
    high: dict[int, int] = field(default_factory=dict)
    """Handle -> pieces that the parent holds."""

    @classmethod
    def start(cls, now: float, rtt_s: float | None = None) -> ParentWatch:
        """``rtt_s``: as far as it is known before a PING was answered; a way longer than the floor would be left before its first word."""
        return cls(heard_at=now, paid_at=now, looked_at=now, rtt_s=rtt_s)

    def heard(self, now: float, *, active: bool) -> None:
        if active:
            self.gap_s = max(self.gap_s * JITTER_DECAY, min(now - self.heard_at, SILENCE_FLOOR_S))
        self.heard_at = now

    def paid(self, now: float) -> None:
        self.paid_at = now

    def deaf(self, now: float) -> None:
        """We have stopped reading: what is not heard meanwhile does not count."""
        self.heard_at = self.paid_at = self.looked_at = now

    def ping_answered(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s if self.rtt_s is None else 0.875 * self.rtt_s + 0.125 * rtt_s

    def judge(self, now: float, *, active: bool, held: dict[int, int], every_s: float) -> Verdict:
        """``active``: a transfer runs on this link. ``held``: handle -> pieces that we hold. ``every_s``: planned time between looks."""
        late = now - self.looked_at - every_s
        self.looked_at = now
        if late > LATE_S:
            self.heard_at += late
            self.paid_at += late
        rtt = self.rtt_s or 0.0
        silence = max(4 * rtt, SILENCE_FLOOR_S, JITTER_FACTOR * self.gap_s) if active else IDLE_SILENCE_S
        if now - self.heard_at > silence:
            return Verdict.SILENT
        ahead = any(pieces > held.get(handle, 0) for handle, pieces in self.high.items())
        if not ahead:
            self.paid_at = now
            return Verdict.STAY
        return Verdict.STALLED if now - self.paid_at > max(STALL_FLOOR_S, 8 * rtt) else Verdict.STAY
