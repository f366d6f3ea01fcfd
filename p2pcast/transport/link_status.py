"""A link as shown in ``/status``: its socket options, and the kernel's figures for its connections."""

from __future__ import annotations

import socket
from typing import Any

from p2pcast.transport.link import Link
from p2pcast.transport.socket_options import congestion_of


def link_row(link: Link, role: str) -> dict[str, Any]:
    """Return a link's row in ``/status``. ``role``: the other node's role towards this one. ``stripes_in_use``: how
    many carry pieces; the sender decides. Round-trip times are the slowest stripe's; bytes and rates are sums.
    """
    stripes = list(link.stripes.values())
    infos = [info for stripe in stripes if (info := stripe.info()) is not None]
    first = next((sock for stripe in stripes if (sock := stripe.socket) is not None), None)
    sent = sum(info.sent_bytes for info in infos)
    return {
        "role": role,
        "name": link.name,
        "node": link.remote.hex(),
        "address": link.address,
        "dialled": link.dialled,
        "stripes": len(stripes),
        "stripes_in_use": min(link.in_use, len(stripes)) if role == "child" else None,
        "congestion": congestion_of(first),
        "rtt_ms": _ms([info.rtt_s for info in infos]),
        "min_rtt_ms": _ms([info.min_rtt_s for info in infos]),
        "window_bytes": sum(info.window_packets * info.segment_bytes for info in infos),
        "sent_bytes": sent,
        "received_bytes": sum(info.received_bytes for info in infos),
        "retransmitted": None if not sent else round(sum(info.retransmitted_bytes for info in infos) / sent, 5),
        "delivery_bps": round(sum(info.delivery_bps for info in infos)),
        "send_buffer_bytes": _buffer(first, socket.SO_SNDBUF),
        "receive_buffer_bytes": _buffer(first, socket.SO_RCVBUF),
    }


def _ms(times_s: list[float]) -> float | None:
    return round(max(times_s) * 1e3, 3) if times_s else None


def _buffer(sock: Any, option: int) -> int | None:
    """Return the current size of one stripe's buffer, which the kernel may have grown."""
    try:
        return None if sock is None else int(sock.getsockopt(socket.SOL_SOCKET, option))
    except OSError:
        return None
