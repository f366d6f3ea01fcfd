"""What Linux tells about a TCP connection: ``struct tcp_info`` (include/uapi/linux/tcp.h), as far as it is used here. Pure but for ``read``.

A kernel that knows less answers with fewer bytes: what it leaves out is 0.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

SIZE = 232
"""Up to snd_wnd, since Linux 5.4."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Bytes count payload from the beginning of the connection. ``retransmitted_bytes``: sent again, of ``sent_bytes``. ``window_packets``: that
    congestion control lets be on the way; ``delivery_bps``: the last rate at which packets were acknowledged; ``busy_s``: how long there was something to send, or on
    its way; ``held_back_s``: how much of that the other side's receive buffer, or this side's send buffer, was full."""

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
    raw = raw.ljust(SIZE, b"\0")

    def u32(offset: int) -> int:
        return int(struct.unpack_from("=I", raw, offset)[0])

    def u64(offset: int) -> int:
        return int(struct.unpack_from("=Q", raw, offset)[0])

    lowest_us = u32(148)
    return TcpInfo(
        rtt_s=u32(68) / 1e6,
        # Its greatest value says that there was no sample yet.
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
    """None where this kernel does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if sock is None or option is None:
        return None
    try:
        return parse(sock.getsockopt(socket.IPPROTO_TCP, option, SIZE))
    except OSError:
        return None
