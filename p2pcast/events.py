"""What happens at a daemon, for whoever listens: a ring of the newest events, each with an id, a kind, the time and its facts.

Promises: ids only grow, across restarts too as long as the clock does not go back, so a reader that comes back says where it was; memory is bounded by the ring
whatever readers do; telling an event never waits and never fails. Who falls behind the ring is told what it has missed.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from p2pcast import limits
from p2pcast.bell import Bell


@dataclass(frozen=True, slots=True)
class Event:
    """``time_s``: Unix time. ``facts``: fit for JSON."""

    id: int
    kind: str
    time_s: float
    facts: Mapping[str, Any]

    def to_sse(self) -> bytes:
        """As a server-sent event (WHATWG HTML, section 9.2): one line of JSON as its data."""
        data = json.dumps({"time": round(self.time_s, 6), **self.facts}, default=repr, skipkeys=True)
        return f"id: {self.id}\nevent: {self.kind}\ndata: {data}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Missed:
    """Events up to ``to`` that a reader who was at ``since`` will not get; ``restarted``: some of them are an earlier process's, and not all may exist."""

    since: int
    to: int
    restarted: bool

    def to_sse(self) -> bytes:
        data = json.dumps({"since": self.since, "to": self.to, "restarted": self.restarted})
        return f"id: {self.to}\nevent: missed\ndata: {data}\n\n".encode()


class Events:
    """``clock`` gives Unix time. ``bell`` rings at every event: who waits for something to become true looks again then."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = limits.EVENTS_KEPT) -> None:
        self.bell = Bell()
        self.told = 0
        """Events since the start."""
        self.dropped = 0
        """Events that readers did not get: they were too slow, or came back too late."""
        self.readers = 0
        self._clock = clock
        self._start = self.newest = int(clock() * 1e6)
        """The first id is the one after the start's time in microseconds: newer than all of an earlier process."""
        self._ring: deque[Event] = deque(maxlen=kept)

    def emit(self, kind: str, **facts: Any) -> None:
        """``kind``: a word. Long texts are cut."""
        self.newest += 1
        self.told += 1
        self._ring.append(Event(self.newest, kind, self._clock(), {k: _short(v) for k, v in facts.items()}))
        self.bell.ring()

    def after(self, since: int, most: int = limits.EVENTS_AT_ONCE) -> tuple[Missed | None, list[Event]]:
        """What came after the event ``since``, oldest first, at most ``most``; 0: all that is there. An id that was never given is an earlier process's."""
        ring = self._ring
        oldest = ring[0].id if ring else self.newest + 1
        if since > self.newest:
            return Missed(since, oldest - 1, True), self._from(oldest, most)
        missed = None
        if 0 < since < oldest - 1:
            missed = Missed(since, oldest - 1, since < self._start)
        return missed, self._from(max(since + 1, oldest), most)

    def _from(self, first: int, most: int) -> list[Event]:
        ring = self._ring
        at = first - (self.newest - len(ring) + 1)
        return [ring[i] for i in range(at, min(len(ring), at + most))]


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > limits.MAX_EVENT_TEXT:
        return value[: limits.MAX_EVENT_TEXT] + "…"
    return value
