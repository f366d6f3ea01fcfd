"""Whether links with rates alone carry what was asked for, measured with a TCP stream: datagrams cannot be sent one by one at hundreds of Mbit/s by one program.

One stream to a host and one from it, of a few tenths of a second, after its window has opened; what arrives at the other end is counted with its headers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from netem.calibration import TOLERANCE
from netem.namespaces import Namespaces
from netem.shaping import FRAME_BYTES

PORT: Final = 7097
HEADERS_BYTES: Final = 52
"""IPv4 and TCP with its timestamps."""
CHUNK_BYTES: Final = 1 << 18
OPENING_S: Final = 0.3
MEASURED_S: Final = 0.8
TRIES: Final = 5
CONNECT_S: Final = 5.0
BEST_EFFORT_BPS: Final = 2e9
"""Above it one stream of one program need not fill a link: what it gave is said, and is no fault."""


def wire_share(mtu: int) -> float:
    """Of a link's rate, what a TCP stream's own bytes are."""
    return (mtu - HEADERS_BYTES) / (mtu + FRAME_BYTES)


def streamed(net: Namespaces, pairs: Sequence[tuple[str, str]], tries: int = TRIES) -> dict[str, Any]:
    """``{calibration, off}`` of these (sender, receiver): as ``netem.lab.emulated.calibrated``."""
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
            {"from": sender, "to": receiver, "rate_bps": round(got), "asked_rate_bps": asked, "by": "TCP", "faults": faults}
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
