"""How the sockets of links are set up, and what they say of themselves.

- TCP_NODELAY: control frames are small, and keepalives must not wait for an acknowledgement.
- TCP_NOTSENT_LOWAT: little lies in the kernel that has not been sent, so that whichever stripe can send takes the next piece, and a newer version is not behind an older one.
- SO_KEEPALIVE: a stripe that stands by sends nothing for hours, and what is between the ends, a NAT as a rule, forgets it unless something passes every few minutes; one that has been
  forgotten all the same ends now, and not with the first piece that is sent on it.
- SO_RCVLOWAT, on links that bring pieces (``gather``): the kernel wakes the process for the rest of a piece, not for each few packets of it, which costs as much as all that is done
  with the piece.
- TCP_USER_TIMEOUT, once a connection is closed (``hasten``): with bytes queued for somebody who has vanished it would stay in the kernel for a quarter of an hour. Not before: links fall
  silent and are left long before (relay.liveness), and of a connection that says little, on a way that loses much, kernels have been seen to end it long before the time was over.
- Congestion control: what was asked for, else BBR where the kernel has it and lets us: one packet lost in a thousand costs it nothing, and CUBIC most of a long way's rate.
- Buffers are left to the kernel, which grows them with the window up to tcp_wmem and tcp_rmem. A size that is set switches that off, and without
  CAP_NET_ADMIN it is capped by net.core.wmem_max, 208 KiB as a rule: less than a long way needs.
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

from p2pcast.errors import UsageError
from p2pcast.limits import KIB

NOTSENT_LOWAT_BYTES = 128 * KIB
"""Unsent bytes that the kernel may hold for one stripe: less makes the pipe run dry, more makes every hop later."""
USER_TIMEOUT_S = 30.0
"""Twice what a silent child is given."""
KEEP_IDLE_S, KEEP_INTERVAL_S = 60, 10
"""The first after so much silence, others after an unanswered one, nine as a rule."""
SIOCOUTQNSD = 0x894B
SO_MAX_PACING_RATE = 47
"""Linux's, which Python does not name."""
MIN_PACE, MAX_PACE = 1024, (1 << 31) - 1
"""Bytes per second that the option takes as a plain number."""
PREFERRED = "bbr"
SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem")
RECEIVE_BUFFERS = Path("/proc/sys/net/ipv4/tcp_rmem")
USUAL_BUFFER_BYTES = 4 << 20
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

_setsockopt = getattr(ctypes.CDLL(None), "setsockopt", None)
_INT_BYTES = ctypes.sizeof(ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Sockets:
    """``congestion``: None leaves it to the kernel. ``buffer_bytes``: send and receive buffer of a stripe; None leaves them to the kernel."""

    congestion: str | None = None
    buffer_bytes: int | None = None

    def tune(self, sock: Any) -> None:
        """A connection, as soon as it is up; anything but TCP is left alone."""
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


def hasten(sock: Any) -> None:
    """A connection that is about to be closed: what is queued is given up after USER_TIMEOUT_S, if nobody takes it."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if sock is not None and option is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, int(USER_TIMEOUT_S * 1000))


def settled(congestion: str | None) -> Sockets:
    """Sockets with that congestion control; None: BBR where it can be had, else the kernel's own. Raises UsageError for one that can't be had."""
    if congestion is None:
        return Sockets(None if _refusal(PREFERRED) else PREFERRED)
    if (why := _refusal(congestion)) is not None:
        raise UsageError(f"congestion control {congestion!r} {why}; this kernel offers {', '.join(available()) or 'no choice'}")
    return Sockets(congestion)


def own_congestion() -> str:
    """What a socket here gets if nothing is chosen; empty where the kernel does not say."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return congestion_of(sock) or ""


def window_bytes() -> float:
    """What one connection may have on the way, as far as this machine's limits go: the kernel grows buffers up to the last figure of tcp_wmem and tcp_rmem, about half
    of which is payload, the rest its own bookkeeping."""
    most = [_most(path) for path in (SEND_BUFFERS, RECEIVE_BUFFERS)]
    return min((size for size in most if size is not None), default=USUAL_BUFFER_BYTES) / 2


def _most(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None


def available() -> list[str]:
    """Loaded ones; what the kernel would load when asked for is not listed."""
    try:
        return sorted(AVAILABLE.read_text().split())
    except OSError:
        return []


def congestion_of(sock: Any) -> str | None:
    """What a connection uses; None where the kernel does not say."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if sock is None or option is None:
        return None
    try:
        return str(sock.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode())
    except OSError:
        return None


def _refusal(congestion: str) -> str | None:
    """Why a socket of ours can't have it; None: it can."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return "can't be chosen on this system"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, option, congestion.encode())
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                return "is not for ordinary users here (net.ipv4.tcp_allowed_congestion_control)"
            return "is not known here"
        except UnicodeEncodeError:
            return "is not known here"
    return None


def unsent_bytes(descriptor: int) -> int:
    """What lies in the kernel and has not been sent; 0 where it does not say."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, SIOCOUTQNSD, bytes(_INT_BYTES)), sys.byteorder)
    except OSError:
        return 0


def gather(descriptor: int, low_bytes: int) -> None:
    """Have the kernel say that there is something to read once so many bytes are there, or the connection has ended. Where it does not know how, nothing changes.

    Called for every piece, so by the descriptor: a loop's own kind of socket makes a new object for each call.
    """
    if _setsockopt is not None:
        _setsockopt(descriptor, socket.SOL_SOCKET, socket.SO_RCVLOWAT, ctypes.byref(ctypes.c_int(low_bytes)), _INT_BYTES)


def pace(sock: Any, bytes_s: int | None) -> None:
    """Have the kernel send no faster from now on, be it queued already; None: as fast as it can. Where the kernel does not know how, nothing changes."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, -1 if bytes_s is None else min(MAX_PACE, max(MIN_PACE, bytes_s)))
        if bytes_s is None and (name := congestion_of(sock)) == PREFERRED:
            # BBR takes the slow time for what the way carries, and would be long in finding out: it begins anew.
            for each in ("reno", name):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, each.encode())
    except OSError:
        return
