"""Socket options of links, and the kernel's figures for their sockets.

- TCP_NODELAY: control frames are small, and keepalives must not wait for an acknowledgement.
- TCP_NOTSENT_LOWAT: the kernel queues few unsent bytes. So the next piece goes to a stripe that can send now, and a
  newer version does not queue behind an older one.
- SO_KEEPALIVE: an idle stripe sends nothing for hours, and a NAT forgets a connection after a few silent minutes.
  Keepalives prevent that. If a connection has been forgotten, it ends early, not when the first piece is sent.
- SO_RCVLOWAT, on links that receive pieces (``gather``): the kernel wakes the process for the rest of a piece, not for
  every few packets. Each wakeup costs as much as processing a whole piece.
- TCP_USER_TIMEOUT, once a connection is closed (``set_close_timeout``): the kernel would keep bytes queued for a
  vanished host for a quarter of an hour. Not earlier: ``relay.parent_watch`` ends silent links long before, and on
  paths with much loss, kernels end quiet connections long before this timeout.
- Congestion control: as configured, otherwise BBR if the kernel has it. One lost packet in a thousand costs BBR
  nothing, but costs CUBIC most of a long path's rate.
- Buffers: the kernel grows them with the window, up to tcp_wmem and tcp_rmem. Setting a size disables that. Without
  CAP_NET_ADMIN, net.core.wmem_max also caps the size, usually at 208 KiB: less than a long path needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import KIB

NOTSENT_LOWAT_BYTES = 128 * KIB
"""Unsent bytes that the kernel may queue per stripe. Fewer would idle the path; more would delay every hop."""
USER_TIMEOUT_S = 30.0
"""Timeout in seconds for a closed connection's queued bytes: twice the time limit for a silent child."""
KEEP_IDLE_S, KEEP_INTERVAL_S = 60, 10
"""Seconds of silence before the first keepalive, and between unanswered keepalives (usually nine)."""
SIOCOUTQNSD = 0x894B
SO_MAX_PACING_RATE = 47
"""Linux's option number, which is missing from Python's socket module."""
MIN_PACE, MAX_PACE = 1024, (1 << 31) - 1
"""The range in bytes per second that the option accepts as a C int."""
PREFERRED = "bbr"
SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem")
RECEIVE_BUFFERS = Path("/proc/sys/net/ipv4/tcp_rmem")
USUAL_BUFFER_BYTES = 4 << 20
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_setsockopt = getattr(ctypes.CDLL(None), "setsockopt", None)
_INT_BYTES = ctypes.sizeof(ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Sockets:
    """Options for stripes' sockets. ``congestion``: the congestion control; None for the kernel's default.
    ``buffer_bytes``: the size of the send and receive buffers; None to let the kernel size them.
    """

    congestion: str | None = None
    buffer_bytes: int | None = None

    def tune(self, sock: Any) -> None:
        """Set the options of a new connection. Does nothing to sockets other than TCP."""
        if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        options = [
            ("TCP_NODELAY", 1),
            ("TCP_NOTSENT_LOWAT", NOTSENT_LOWAT_BYTES),
            ("TCP_KEEPIDLE", KEEP_IDLE_S),
            ("TCP_KEEPINTVL", KEEP_INTERVAL_S),
        ]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options:
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if self.congestion is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion.encode())
        if self.buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.buffer_bytes)


def set_close_timeout(sock: Any) -> None:
    """Let the kernel drop a closing connection's queued bytes after USER_TIMEOUT_S without acknowledgement."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if sock is not None and option is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        # uvloop raises ValueError for a connection that it has already closed.
        with contextlib.suppress(OSError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(USER_TIMEOUT_S * 1000))


def choose_sockets(congestion: str | None) -> Sockets:
    """Return socket options with this congestion control; None means BBR if available, otherwise the kernel's default.
    Raises UsageError if the named one is not available.
    """
    if congestion is None:
        return Sockets(None if _refusal(PREFERRED) else PREFERRED)
    if (why := _refusal(congestion)) is not None:
        raise UsageError(
            f"congestion control {congestion!r} {why}; this kernel offers {', '.join(available()) or 'no choice'}"
        )
    return Sockets(congestion)


def own_congestion() -> str:
    """Return the kernel's default congestion control; empty if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return congestion_of(sock) or ""


def window_bytes() -> float:
    """Return the most bytes in flight on one connection that this machine's limits allow. The kernel grows buffers up
    to the last figure of tcp_wmem and tcp_rmem; about half of a buffer is payload, the rest bookkeeping.
    """
    most = [_most(path) for path in (SEND_BUFFERS, RECEIVE_BUFFERS)]
    return min((size for size in most if size is not None), default=USUAL_BUFFER_BYTES) / 2


def _most(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None


def available() -> list[str]:
    """Return the loaded congestion controls. The kernel may load further ones on demand."""
    try:
        return sorted(AVAILABLE.read_text().split())
    except OSError:
        return []


def congestion_of(sock: Any) -> str | None:
    """Return a connection's congestion control; None if unknown."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if sock is None or option is None:
        return None
    try:
        return str(sock.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode())
    except OSError:
        return None


def _refusal(congestion: str) -> str | None:
    """Return why this process cannot use a congestion control; None if it can."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "can't be chosen on this system"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, congestion.encode())
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                return "is not allowed for ordinary users (net.ipv4.tcp_allowed_congestion_control)"
            return "is unknown to this kernel"
        except UnicodeEncodeError:
            return "is unknown to this kernel"
    return None


def unsent_bytes(descriptor: int) -> int:
    """Return the number of unsent bytes in the kernel's send buffer; 0 if unknown."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, SIOCOUTQNSD, bytes(_INT_BYTES)), sys.byteorder)
    except OSError:
        return 0


def gather(descriptor: int, low_bytes: int) -> None:
    """Let the kernel report the socket as readable once ``low_bytes`` bytes have arrived, or the connection has ended
    (SO_RCVLOWAT). Has no effect if the kernel does not have the option.

    Takes the descriptor, because the loop's socket wrapper would create an object per call, that is per piece.
    """
    if _setsockopt is not None:
        _setsockopt(
            descriptor, socket.SOL_SOCKET, socket.SO_RCVLOWAT, ctypes.byref(ctypes.c_int(low_bytes)), _INT_BYTES
        )


def pace(sock: Any, bytes_s: int | None) -> None:
    """Limit the send rate in bytes per second, for queued bytes too; None means no limit. Has no effect if the kernel
    does not have the option.
    """
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        sock.setsockopt(
            socket.SOL_SOCKET, SO_MAX_PACING_RATE, -1 if bytes_s is None else min(MAX_PACE, max(MIN_PACE, bytes_s))
        )
        if bytes_s is None and (name := congestion_of(sock)) == PREFERRED:
            # Reset BBR: its bandwidth estimate reflects our own pacing.
            for each in ("reno", name):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, each.encode())
    except OSError:
        return
