"""Recorded events of a hub, played at their own pace or faster, for the same page as a live run's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final

from p2pcast.daemon.http_access import HttpAccess
from p2pcast.daemon.http_server import DaemonView, Document, HttpServer
from p2pcast.fleet_verdict import judge
from p2pcast.page.page_routes import PageRoutes
from p2pcast.page.picture_feed import PictureFeed
from p2pcast.page.reading_rights import ReadingRights
from p2pcast.page.recorded_run import SIMULATED, Recorded, RecordedRun
from p2pcast.process.events import Events

MOST_PAUSE_S: Final = 3.0
"""Longest time in seconds between two events, however long they were apart."""


class RunReplay(DaemonView):
    """``speed``: seconds of the run in one second. ``name``: of the run, where no event names it. ``start`` serves the
    page, ``play`` plays the events once.
    """

    def __init__(self, recorded: Sequence[Recorded], speed: float, name: str) -> None:
        self._recorded, self._speed = recorded, speed
        self._now_s = recorded[0].time_s if recorded else 0.0
        run = next((event.run for event in recorded if event.run), "")
        self._run = RecordedRun(run[:12] or name)
        simulated = bool(recorded) and recorded[0].kind == SIMULATED
        source = "a simulation" if simulated else "a recorded run"
        self.events = Events(clock=lambda: self._now_s)
        self.feed = PictureFeed(self._run.status, self.events, lambda: self._now_s, source)
        page = PageRoutes(self.feed, ReadingRights())
        access = HttpAccess(secrets.token_hex(16), admits=page.admits)
        self.http = HttpServer(self, access, self.events, routes=page.routes)

    def status(self) -> Document:
        return judge(self._run.status())

    async def play(self) -> None:
        """Play all events in order. The last state stays on the page."""
        for event in self._recorded:
            await asyncio.sleep(min(MOST_PAUSE_S, max(0.0, event.time_s - self._now_s) / self._speed))
            self._now_s = max(self._now_s, event.time_s)
            self._run.apply(event.kind, self._now_s, event.facts)
            self.events.emit(event.kind, **event.facts)
