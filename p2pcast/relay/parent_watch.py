"""Decides when a child leaves its parent (docs/formats/wire-protocol.md, section 5). Pure: time is passed in.

Design target: bytes flow again within a second after a parent's failure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from p2pcast.relay.tuning import (
    BLOCKED_LOOP_S,
    IDLE_SILENCE_S,
    JITTER_DECAY,
    JITTER_FACTOR,
    SILENCE_FLOOR_S,
    STALL_FLOOR_S,
)


class ParentVerdict(Enum):
    STAY = "stay"
    SILENT = "silent"
    STALLED = "ahead but not sending"


@dataclass(slots=True)
class ParentWatch:
    """A child's record of its parent. Times are seconds of one monotonic clock."""

    last_received_at: float
    """Time of the last byte of any kind."""
    payload_at: float
    """Time of the last payload byte."""
    checked_at: float
    rtt_s: float | None = None
    gap_s: float = 0.0
    """Longest recent gap between reads during a transfer, decaying."""
    high: dict[int, int] = field(default_factory=dict)
    """Handle -> number of pieces that the parent has."""

    @classmethod
    def start(cls, now: float, rtt_s: float | None = None) -> ParentWatch:
        """``rtt_s``: the round trip known before the first PONG. Without it, a parent with a round trip above the
        silence floor would be left before its first message.
        """
        return cls(last_received_at=now, payload_at=now, checked_at=now, rtt_s=rtt_s)

    def got_message(self, now: float, *, active: bool) -> None:
        """Note that anything came from the parent. ``active``: a transfer is running or due."""
        if active:
            self.gap_s = max(self.gap_s * JITTER_DECAY, min(now - self.last_received_at, SILENCE_FLOOR_S))
        self.last_received_at = now

    def got_payload(self, now: float) -> None:
        self.payload_at = now

    def ignore_silence(self, now: float) -> None:
        """Ignore silence until ``now``, because this node does not read from the parent."""
        self.last_received_at = self.payload_at = self.checked_at = now

    def ping_answered(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s if self.rtt_s is None else 0.875 * self.rtt_s + 0.125 * rtt_s

    def judge(self, now: float, *, active: bool, held: dict[int, int], every_s: float) -> ParentVerdict:
        """Judge the parent. ``active``: a transfer is running on this link. ``held``: handle -> number of pieces that
        this node has. ``every_s``: planned seconds between two calls.
        """
        late = now - self.checked_at - every_s
        self.checked_at = now
        if late > BLOCKED_LOOP_S:
            self.last_received_at += late
            self.payload_at += late
        rtt = self.rtt_s or 0.0
        silence = max(4 * rtt, SILENCE_FLOOR_S, JITTER_FACTOR * self.gap_s) if active else IDLE_SILENCE_S
        if now - self.last_received_at > silence:
            return ParentVerdict.SILENT
        ahead = any(pieces > held.get(handle, 0) for handle, pieces in self.high.items())
        if not ahead:
            self.payload_at = now
            return ParentVerdict.STAY
        return ParentVerdict.STALLED if now - self.payload_at > max(STALL_FLOOR_S, 8 * rtt) else ParentVerdict.STAY
