"""HTTP to a daemon over a connection that the caller makes, for example from a host of an emulated network: a document,
or all events that the daemon reports (``/events``).

Promise: no event of the daemon's life is missed. Times are the daemon's; both clocks are this machine's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.ground.errors import LocalError

Connect = Callable[[], socket.socket]
AGAIN_S = 0.05
SILENCE_S = 300.0
"""Longer than the daemon's comment interval of 15 s, and than a daemon is stopped."""
POLL_S = 0.5
"""Interval at which waiting code checks that waiting still makes sense."""


class MadeConnection(http.client.HTTPConnection):
    def __init__(self, connect: Connect) -> None:
        super().__init__("127.0.0.1")
        self._connect = connect

    def connect(self) -> None:
        self.sock: socket.socket = self._connect()


def document(connect: Connect, name: str, path: str) -> dict[str, Any]:
    """Raises OSError without an answer, LocalError for an error status."""
    connection = MadeConnection(connect)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise LocalError(f"{name} answered {path}: {found.get('error')}")
    return found


@contextmanager
def events(connect: Connect, silence_s: float, bearer: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Kind and facts of each event, from the daemon's first on; both empty for a keepalive. ``silence_s``: time limit
    of each line. ``bearer``: token, which earlier releases ask for. Raises OSError.
    """
    connection = MadeConnection(connect)
    try:
        headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {bearer}"}
        connection.request("GET", "/events?since=0", headers=headers)
        answer = connection.getresponse()
        connection.sock.settimeout(silence_s)
        yield _event_stream(answer)
    finally:
        connection.close()


def _event_stream(answer: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    while line := answer.readline():
        word, _, rest = line.decode().rstrip().partition(": ")
        if word == "event":
            kind = rest
        elif word == "data":
            yield kind, json.loads(rest)
        elif line.startswith(b":"):
            yield "", {}


@dataclass(frozen=True, slots=True)
class ReportedEvent:
    kind: str
    time_s: float
    """Unix time."""
    facts: Mapping[str, Any]


class EventReader:
    """Connected to one daemon, in its own thread, which ends with the daemon or with ``close``. ``bearer``: the file of
    its HTTP token.
    """

    def __init__(self, connect: Connect, bearer: Path, name: str) -> None:
        self._connect, self._bearer = connect, bearer
        self._events: list[ReportedEvent] = []
        self._more = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name=f"p2pcast-listening-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True

    @property
    def reported(self) -> list[ReportedEvent]:
        with self._more:
            return list(self._events)

    def find(self, kind: str, **facts: Any) -> ReportedEvent | None:
        """The first event of that kind with these facts."""
        return next((event for event in self.reported if _fits(event, kind, facts)), None)

    def wait(self, kind: str, limit_s: float, check: Callable[[], None], **facts: Any) -> ReportedEvent | None:
        """As ``find``, once the event has happened; None after ``limit_s``. ``check`` is called regularly, and may
        raise.
        """
        deadline = time.monotonic() + limit_s
        while (found := self.find(kind, **facts)) is None and time.monotonic() < deadline:
            check()
            with self._more:
                self._more.wait(POLL_S)
        return found

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, ValueError):
                self._read_events()
                return
            time.sleep(AGAIN_S)

    def _read_events(self) -> None:
        with (
            events(self._connect, SILENCE_S, self._bearer.read_text().strip()) as every,
            contextlib.suppress(OSError),
        ):  # the daemon was killed
            for kind, facts in every:
                if self._closed:
                    return
                if kind:
                    self._take(kind, facts)

    def _take(self, kind: str, facts: dict[str, Any]) -> None:
        with self._more:
            self._events.append(ReportedEvent(kind, float(facts.pop("time", 0.0)), facts))
            self._more.notify_all()


def _fits(event: ReportedEvent, kind: str, facts: Mapping[str, Any]) -> bool:
    return event.kind == kind and all(event.facts.get(name) == value for name, value in facts.items())
