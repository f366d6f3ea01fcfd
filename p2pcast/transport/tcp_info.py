"""Fields of Linux's ``struct tcp_info`` of a connection (include/uapi/linux/tcp.h). Pure except for ``read``.

An older kernel returns fewer bytes; missing fields read as 0.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

FIELDS = struct.Struct("=16x I 48x I 8x I 36x QQ 12x I 8x QQQQ 8x QQ 16x")
"""The fields used here, and the bytes between them, up to snd_wnd (since Linux 5.4)."""
NO_SAMPLE = 0xFFFFFFFF
"""The kernel's value of the minimum round-trip time before the first sample."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Byte counts are payload since the connection was made; ``sent_bytes`` includes ``retransmitted_bytes``.
    ``window_packets``: the congestion window. ``delivery_bps``: the newest rate of acknowledged data. ``busy_s``: time
    with data to send or in flight. ``held_back_s``: the part of ``busy_s`` in which the other side's receive buffer or
    this side's send buffer was full.
    """

    rtt_s: float
    min_rtt_s: float
    window_packets: int
    segment_bytes: int
    acked_bytes: int
    received_bytes: int
    sent_bytes: int
    retransmitted_bytes: int
    delivery_bps: float
    busy_s: float = 0.0
    held_back_s: float = 0.0


def parse(raw: bytes) -> TcpInfo:
    """Decode the struct, which may be truncated."""
    raw = raw.ljust(FIELDS.size, b"\0")
    segment, rtt, window, acked, received, lowest, delivery, busy, theirs, ours, sent, again = FIELDS.unpack(raw)
    return TcpInfo(
        rtt_s=rtt / 1e6,
        min_rtt_s=0.0 if lowest == NO_SAMPLE else lowest / 1e6,
        window_packets=window,
        segment_bytes=segment,
        acked_bytes=acked,
        received_bytes=received,
        sent_bytes=sent,
        retransmitted_bytes=again,
        delivery_bps=delivery * 8.0,
        busy_s=busy / 1e6,
        held_back_s=(theirs + ours) / 1e6,
    )


def read(sock: Any) -> TcpInfo | None:
    """Return the kernel's figures for a socket; None if unknown."""
    option = getattr(socket, "TCP_INFO", None)
    if sock is None or option is None:
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, option, FIELDS.size))
    except OSError:
        return None
