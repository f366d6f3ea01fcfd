"""HTTP to a daemon over a connection that the caller makes, for example from a host of an emulated network."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from p2pcast.ground.errors import LocalError

Connect = Callable[[], socket.socket]


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
