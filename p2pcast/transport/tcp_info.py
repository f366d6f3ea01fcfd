"""Linux's ``struct tcp_info`` of a connection (include/uapi/linux/tcp.h), the fields used here. Pure except ``read``.

An older kernel returns fewer bytes; missing fields read as 0.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

SIZE = 232
"""Bytes of the struct up to snd_wnd, since Linux 5.4."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Byte counts are payload since the connection's beginning; ``retransmitted_bytes`` are part of ``sent_bytes``.
    ``window_packets``: congestion window. ``delivery_bps``: the newest rate of acknowledged data. ``busy_s``: time with
    data to send or in flight. ``held_back_s``: the part of ``busy_s`` with a full receive buffer at the other side, or
    a full send buffer at this side.
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
    raw = raw.ljust(SIZE, b"\0")

    def u32(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    def u64(offset: int) -> int:
        return int(struct.unpack_from("=Q", raw, offset)[0])

    lowest_us = u32(148)
    return TcpInfo(
        rtt_s=u32(68) / 1e6,
        # The greatest value means no sample yet.
        min_rtt_s=0.0 if lowest_us == 0xFFFFFFFF else lowest_us / 1e6,
        window_packets=u32(80),
        segment_bytes=u32(16),
        acked_bytes=u64(120),
        received_bytes=u64(128),
        sent_bytes=u64(200),
        retransmitted_bytes=u64(208),
        delivery_bps=u64(160) * 8.0,
        busy_s=u64(168) / 1e6,
        held_back_s=(u64(176) + u64(184)) / 1e6,
    )


def read(sock: Any) -> TcpInfo | None:
    """The kernel's figures for a socket; None where unknown."""
    option = getattr(socket, "TCP_INFO", None)
    if sock is None or option is None:
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, option, SIZE))
    except OSError:
        return None
