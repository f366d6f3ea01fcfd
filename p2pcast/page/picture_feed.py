"""Pictures of a run for all viewers of its page: made once, and sent as changes.

Guarantees: without a viewer nothing is computed. All viewers together cost at most ``SHARE`` of one core for making
pictures, whatever the size of the fleet. A viewer that does not read loses its connection and delays no other viewer.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from p2pcast.ground.wakeup import Wakeup
from p2pcast.page.fleet_history import FleetHistory
from p2pcast.page.fleet_picture import changes, picture
from p2pcast.process.background_tasks import report_bug
from p2pcast.process.events import Event, Events

INTERVAL_S: Final = 0.5
"""Least time in seconds between two pictures."""
SHARE: Final = 0.03
"""Share of one core that may be spent on making pictures."""
FAILED_S: Final = 60.0
"""Time in seconds until the next attempt after a failure."""
CHANGES_KEPT: Final = 64
EVENTS_SHOWN: Final = 100
"""Newest events of either kind: routine, and others."""
ROUTINE: Final = frozenset({"opened", "sealed", "published", "staged", "committed", "kept", "mirrored"})
"""Kinds of events that come with every version."""
COMPRESSION: Final = 4

Document = dict[str, Any]


class PictureFeed:
    """``status``: of the hub. ``wakeup`` is notified at every change. ``clock``: Unix time in seconds. ``source``: as
    of ``picture``.
    """

    def __init__(
        self,
        status: Callable[[], Mapping[str, Any]],
        events: Events,
        clock: Callable[[], float] = time.time,
        source: str = "live",
    ) -> None:
        self.wakeup = Wakeup()
        self.viewers = 0
        self._status, self._events, self._clock, self._source = status, events, clock, source
        self._history, self._seen = FleetHistory(), 0
        self._newest: dict[bool, deque[Document]] = {routine: deque(maxlen=EVENTS_SHOWN) for routine in (False, True)}
        self._number = 0
        self._picture: Document | None = None
        self._whole: bytes | None = None
        self._made_s = self._took_s = 0.0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=CHANGES_KEPT)
        self._asked = asyncio.Event()

    async def run(self) -> None:
        """Make pictures while a viewer is connected. Runs until cancelled."""
        while True:
            if not self.viewers:
                self._asked.clear()
                await self._asked.wait()
            try:
                self._renew()
            except Exception as error:  # noqa: BLE001 - what peers report must not end the hub
                report_bug("page", error)
                await asyncio.sleep(FAILED_S)
            await asyncio.sleep(max(INTERVAL_S, self._took_s / SHARE))

    def look(self) -> None:
        """Note that a viewer has connected, so that pictures are made."""
        self._asked.set()

    def whole(self) -> bytes:
        """The present picture, compressed by gzip; its number is that of the changes which follow."""
        if self._picture is None or time.monotonic() - self._made_s > max(INTERVAL_S, self._took_s / SHARE):
            self._renew()
        if self._whole is None:
            document = {
                "number": self._number,
                **(self._picture or {}),
                "events": [*self._newest[True], *self._newest[False]],
            }
            self._whole = gzip.compress(_encoded(document), COMPRESSION)
        return self._whole

    def after(self, number: int) -> list[bytes] | None:
        """Server-sent events of the changes after picture ``number``; None if some are not kept any more."""
        if number > self._number or number < self._number - len(self._kept):
            return None
        return [text for at, text in self._kept if at > number]

    @property
    def number(self) -> int:
        return self._number

    def _renew(self) -> None:
        began_s = time.monotonic()
        fresh = self._follow_events()
        new = picture(self._status(), self._history, self._clock(), self._source)
        if self._picture is not None:
            change = changes(self._picture, new) | ({"events": fresh} if fresh else {})
            self._number += 1
            self._kept.append((self._number, b"id: %d\ndata: %s\n\n" % (self._number, _encoded(change))))
        self._picture, self._whole = new, None
        self._made_s = time.monotonic()
        self._took_s = self._made_s - began_s
        self.wakeup.notify()

    def _follow_events(self) -> list[Document]:
        """Return the events since the last picture; if there are many, only the newest."""
        fresh: list[Document] = []
        while True:
            missed, batch = self._events.after(self._seen)
            if missed is not None:
                self._history = FleetHistory()
                self._seen = missed.to
            if not batch:
                break
            for event in batch:
                self._history.apply(event.kind, event.time_s, event.facts)
                fresh.append(_shown(event))
            self._seen = batch[-1].id
        for routine, kept in self._newest.items():
            kept.extend(event for event in fresh if event["routine"] == routine)
        return fresh[-EVENTS_SHOWN:]


def _shown(event: Event) -> Document:
    routine = event.kind in ROUTINE
    return {
        "id": event.id,
        "kind": event.kind,
        "time": round(event.time_s, 3),
        "routine": routine,
        "facts": dict(event.facts),
    }


def _encoded(document: Document) -> bytes:
    """Peers report arbitrary values: none of them may fail the whole picture."""
    try:
        return _json(document)
    except ValueError:
        return _json(_finite(document))


def _json(document: Document) -> bytes:
    return json.dumps(document, default=repr, skipkeys=True, separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """Return ``value`` with None in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
