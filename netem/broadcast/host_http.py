"""HTTP to a daemon on the loopback of its emulated host."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from netem.emulation.description import Emulated
from p2pcast.ground.errors import LocalError

HTTP_PORT = 7078


class HostConnection(http.client.HTTPConnection):
    def __init__(self, net: Emulated, host: str, timeout_s: float) -> None:
        super().__init__("127.0.0.1", HTTP_PORT, timeout=timeout_s)
        self._net, self._at, self._timeout_s = net, host, timeout_s

    def connect(self) -> None:
        self.sock: socket.socket = self._net.connect(self._at, ("127.0.0.1", HTTP_PORT), self._timeout_s)


def document(net: Emulated, host: str, path: str, timeout_s: float) -> dict[str, Any]:
    """Raises OSError without an answer, LocalError for an error status."""
    connection = HostConnection(net, host, timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise LocalError(f"{host} answered {path}: {found.get('error')}")
    return found


@contextmanager
def events(
    net: Emulated, host: str, answer_s: float, silence_s: float
) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Kind and facts of each event, from the daemon's first on; both empty for a keepalive. ``answer_s``: time limit of
    the first byte. ``silence_s``: time limit of each next line. Raises OSError.
    """
    connection = HostConnection(net, host, answer_s)
    try:
        connection.request("GET", "/events?since=0", headers={"Accept": "text/event-stream"})
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
