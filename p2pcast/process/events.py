"""A daemon's events for readers of ``/events``: a ring of the newest events, each with an id, a kind, a time and facts.

Guarantees: ids only grow, even across restarts unless the clock is set back, so a reader can resume at an id. The ring
bounds memory, whatever readers do. Emitting an event never blocks and never fails. A reader that falls behind the ring
gets a ``missed`` event.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from p2pcast.ground import limits
from p2pcast.ground.wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class Event:
    """``time_s``: Unix time in seconds. ``facts``: values that JSON can hold."""

    id: int
    kind: str
    time_s: float
    facts: Mapping[str, Any]

    def to_sse(self, run: str | None = None) -> bytes:
        """Return a server-sent event (WHATWG HTML, section 9.2) with one line of JSON as its data. ``run``: the run's
        id in hex.
        """
        facts = self.facts if run is None else {"run": run, **self.facts}
        data = json.dumps({"time": round(self.time_s, 6), **facts}, default=repr, skipkeys=True)
        return f"id: {self.id}\nevent: {self.kind}\ndata: {data}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Missed:
    """The events after ``since`` and up to ``to``, which a reader has missed. ``restarted``: some of them belong to an
    earlier process, and some of these ids may never have existed.
    """

    since: int
    to: int
    restarted: bool

    def to_sse(self) -> bytes:
        data = json.dumps({"since": self.since, "to": self.to, "restarted": self.restarted})
        return f"id: {self.to}\nevent: missed\ndata: {data}\n\n".encode()


class Events:
    """``clock`` returns Unix time in seconds. ``wakeup`` is rung at every event, so that waiting tasks check their
    condition again. ``kept``: the number of events in the ring.
    """

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = limits.EVENTS_KEPT) -> None:
        self.wakeup = Wakeup()
        self.emitted = 0
        """Number of events since the start."""
        self.dropped = 0
        """Number of events that readers missed, because the readers were too slow or resumed too late."""
        self.readers = 0
        self.run: str | None = None
        """Id of the run in hex, once it is known."""
        self._clock = clock
        self._start = self.newest = int(clock() * 1e6)
        """Ids begin at the start time in microseconds, above all ids of an earlier process."""
        self._ring: deque[Event] = deque(maxlen=kept)

    def emit(self, kind: str, **facts: Any) -> None:
        """Add an event. ``kind``: one word. Texts longer than MAX_EVENT_TEXT are truncated."""
        self.newest += 1
        self.emitted += 1
        self._ring.append(Event(self.newest, kind, self._clock(), {k: _short(v) for k, v in facts.items()}))
        self.wakeup.notify()

    def after(self, since: int, most: int = limits.EVENTS_AT_ONCE) -> tuple[Missed | None, list[Event]]:
        """Return up to ``most`` events after id ``since``, oldest first, and the events missed before them. If
        ``since`` is 0, start at the ring's oldest event. An id above the newest one belongs to an earlier process.
        """
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
