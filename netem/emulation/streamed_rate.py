"""Checks with a TCP stream whether links with rates alone carry the requested rate. One program cannot send single
datagrams at hundreds of Mbit/s.

One stream to a host and one from the host, of a few tenths of a second, after its window has opened. Bytes that arrive
at the other end are counted with their headers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from netem.emulation.calibration import TOLERANCE
from netem.emulation.namespaces import Namespaces
from netem.emulation.shaping import FRAME_BYTES

PORT: Final = 7097
HEADERS_BYTES: Final = 52
"""IPv4 and TCP with its timestamps."""
CHUNK_BYTES: Final = 1 << 18
OPENING_S: Final = 0.3
MEASURED_S: Final = 0.8
TRIES: Final = 5
CONNECT_S: Final = 5.0
BEST_EFFORT_BPS: Final = 2e9
"""Above this rate, one stream of one program need not fill a link: the measured rate is reported and never counts as
off.
"""


def wire_share(mtu: int) -> float:
    """A TCP stream's own bytes as a share of a link's rate."""
    return (mtu - HEADERS_BYTES) / (mtu + FRAME_BYTES)


def streamed(net: Namespaces, pairs: Sequence[tuple[str, str]], tries: int = TRIES) -> dict[str, Any]:
    """``{calibration, off}`` of these (sender, receiver) pairs, as ``netem.emulation.calibration.calibrated``."""
    rows, off = [], []
    for sender, receiver in pairs:
        asked = net.network.way(sender, receiver).rate_bps
        if asked is None:
            continue
        for _ in range(tries):
            got = _rate(net, sender, receiver)
            wrong = abs(got / asked - 1) > TOLERANCE and asked <= BEST_EFFORT_BPS
            if not wrong:
                break
        faults = [f"{sender} → {receiver}: {got / 1e6:.1f} Mbit/s instead of {asked / 1e6:.1f} Mbit/s"] if wrong else []
        rows.append(
            {
                "from": sender,
                "to": receiver,
                "rate_bps": round(got),
                "asked_rate_bps": asked,
                "by": "TCP",
                "faults": faults,
            }
        )
        off += faults
    return {"calibration": rows, "off": off}


def _rate(net: Namespaces, sender: str, receiver: str) -> float:
    address = (net.network.address(receiver), PORT)
    with contextlib.closing(net.at(receiver, lambda: _listening(address))) as server:
        one = net.connect(sender, address, CONNECT_S)
        other, _ = server.accept()
        with one, other:
            thread = threading.Thread(target=_send, args=(one,), name="p2pcast-streamed", daemon=True)
            thread.start()
            try:
                _read_for(other, OPENING_S)
                began = time.perf_counter()
                got = _read_for(other, MEASURED_S)
                took_s = time.perf_counter() - began
            finally:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                thread.join()
    return 8 * got / took_s / wire_share(net.network.mtu)


def _listening(address: tuple[str, int]) -> socket.socket:
    return socket.create_server(address, reuse_port=False)


def _send(sock: socket.socket) -> None:
    chunk = bytes(CHUNK_BYTES)
    with contextlib.suppress(OSError):
        sock.settimeout(None)
        while True:
            sock.sendall(chunk)


def _read_for(sock: socket.socket, duration_s: float) -> int:
    room, got = bytearray(CHUNK_BYTES), 0
    end = time.perf_counter() + duration_s
    while time.perf_counter() < end:
        got += sock.recv_into(room)
    return got
