"""Throughput and loss between two machines, each with a ``p2pcast doctor``: one answers, the other measures.

The measuring side connects once for the round trip, and then twice. On each of these two connections it sends ``MAGIC``
and one byte for the direction of the data:

- ``SEND``: it sends zeros for ``RUN_S`` seconds and ends its half. The answer is the number of bytes received (u64).
- ``RECEIVE``: the other side sends zeros for ``RUN_S`` seconds, then a trailer: bytes sent and bytes sent again (u64
  each; all ones for unknown), and closes.

Guarantees: the answering side keeps no data, and serves one connection at a time. It ends after ``CONNECTIONS``
complete ones, or after its time. It sends nothing to a program that does not begin with ``MAGIC``. The measuring side
raises nothing.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from p2pcast.doctor.machine_facts import PathFacts
from p2pcast.ground.addresses import Address, show_address
from p2pcast.ground.limits import KIB
from p2pcast.sockets.listen_sockets import listening
from p2pcast.transport import tcp_info
from p2pcast.transport.socket_options import choose_sockets

MAGIC = b"p2pcast-doctor-1"
SEND, RECEIVE = b"s", b"r"
CONNECTIONS = 2
RUN_S = 4.0
"""Seconds of data in one direction: long enough for slow start on a path of 300 ms."""
WAIT_S = 10.0
"""Time limit in seconds of each connect, send and receive."""
CHUNK = bytes(256 * KIB)
COUNT, TRAILER = struct.Struct("<Q"), struct.Struct("<QQ")
UNKNOWN = (1 << 64) - 1


class _NoDoctorError(OSError):
    """The other side does not follow this module's protocol."""


def answer(listen: Address, time_s: float, opened: Callable[[str], None]) -> int:
    """Answer until ``CONNECTIONS`` have been served or ``time_s`` has passed, and return how many were served.
    ``opened`` is called with the address. Raises LocalError.
    """
    with contextlib.ExitStack() as ends:
        sockets = [ends.enter_context(sock) for sock in listening(*listen, "--answer")]
        for sock in sockets:
            sock.listen(1)
        opened(show_address(*sockets[0].getsockname()[:2]))
        served, end = 0, time.monotonic() + time_s
        while served < CONNECTIONS and (left_s := end - time.monotonic()) > 0:
            for ready in select.select(sockets, [], [], left_s)[0]:
                with contextlib.suppress(OSError), ready.accept()[0] as sock:
                    sock.settimeout(WAIT_S)
                    _serve(sock)
                    served += 1
        return served


def _serve(sock: socket.socket) -> None:
    """Raises OSError."""
    choose_sockets(None).tune(sock)
    begin = _exactly(sock, len(MAGIC) + 1)
    if begin == MAGIC + SEND:
        sock.sendall(COUNT.pack(_drain(sock)[0]))
    elif begin == MAGIC + RECEIVE:
        _fill(sock)
        info = tcp_info.read(sock)
        known = info is not None and info.sent_bytes > 0
        counts = (info.sent_bytes, info.retransmitted_bytes) if info is not None and known else (UNKNOWN, UNKNOWN)
        sock.sendall(TRAILER.pack(*counts))
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)  # wait until the other side has everything: it closes then
    else:
        raise _NoDoctorError("not a doctor")


def measure_path(to: Address) -> PathFacts:
    """Measure the path in both directions, one after the other."""
    facts = PathFacts(address=show_address(*to))
    try:
        began = time.monotonic()
        with socket.create_connection(to, timeout=WAIT_S):
            facts = replace(facts, rtt_s=time.monotonic() - began)
        facts = _send(facts, to)
        return _receive(facts, to)
    except (OSError, ValueError) as error:
        return replace(facts, fault=str(getattr(error, "strerror", None) or error or type(error).__name__))


@contextlib.contextmanager
def _connected(to: Address, direction: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(to, timeout=WAIT_S) as sock:
        choose_sockets(None).tune(sock)
        sock.sendall(MAGIC + direction)
        yield sock


def _send(facts: PathFacts, to: Address) -> PathFacts:
    with _connected(to, SEND) as sock:
        began = time.monotonic()
        _fill(sock)
        sock.shutdown(socket.SHUT_WR)
        (received,) = COUNT.unpack(_exactly(sock, COUNT.size))
        took_s = time.monotonic() - began
        info = tcp_info.read(sock)
    loss = None if info is None or not info.sent_bytes else info.retransmitted_bytes / info.sent_bytes
    return replace(facts, there_bps=received * 8 / max(took_s, 1e-9), there_loss=loss)


def _receive(facts: PathFacts, to: Address) -> PathFacts:
    with _connected(to, RECEIVE) as sock:
        began = time.monotonic()
        received, last = _drain(sock)
        took_s = time.monotonic() - began
    if len(last) < TRAILER.size:
        raise _NoDoctorError("the answer is not a doctor's")
    sent, again = TRAILER.unpack(last)
    loss = None if UNKNOWN in (sent, again) or not sent else min(1.0, again / sent)
    return replace(facts, back_bps=(received - TRAILER.size) * 8 / max(took_s, 1e-9), back_loss=loss)


def _fill(sock: socket.socket) -> None:
    """Send zeros for ``RUN_S`` seconds. Raises OSError."""
    end = time.monotonic() + RUN_S
    while time.monotonic() < end:
        sock.send(CHUNK)


def _drain(sock: socket.socket) -> tuple[int, bytes]:
    """Receive until the other side closes, for at most ``RUN_S`` plus ``WAIT_S``. Returns the number of bytes and the
    last of them. Raises OSError.
    """
    buffer, count, last = bytearray(len(CHUNK)), 0, b""
    end = time.monotonic() + RUN_S + WAIT_S
    while size := sock.recv_into(buffer):
        count += size
        last = (last + bytes(buffer[max(0, size - TRAILER.size) : size]))[-TRAILER.size :]
        if time.monotonic() > end:
            raise _NoDoctorError("the other side does not end")
    return count, last


def _exactly(sock: socket.socket, size: int) -> bytes:
    """Raises OSError."""
    found = b""
    while len(found) < size:
        part = sock.recv(size - len(found))
        if not part:
            raise _NoDoctorError("the other side closed the connection")
        found += part
    return found
