"""Listening sockets, in both address families where available, and the addresses to advertise for them."""

from __future__ import annotations

import contextlib
import errno
import socket

from p2pcast.ground.addresses import ANYWHERE, Address, may_be_advertised
from p2pcast.ground.errors import LocalError

PROBED = {socket.AF_INET6: "2001:db8::1", socket.AF_INET: "192.0.2.1"}
"""Addresses reserved for documentation (RFC 3849, RFC 5737), as targets for looking up routes. No packet is sent."""


def listening(host: str, port: int, option: str) -> list[socket.socket]:
    """Return bound sockets, one for each address of ``host``, all on one port; for ``""`` and ``::``, one for both
    families. Port 0 asks for a free port. ``option``: the command-line option to name in the error. Raises LocalError.
    """
    made: list[socket.socket] = []
    try:
        for family, address in _addresses(host):
            sock = socket.socket(family, socket.SOCK_STREAM)
            made.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host not in ANYWHERE))
            sock.bind((address, made[0].getsockname()[1] if port == 0 and len(made) > 1 else port))
    except OSError as error:
        for sock in made:
            sock.close()
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
        raise LocalError(f"{reason}; choose another with {option} HOST:PORT") from None
    return made


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the family and text of each address of ``host``. Raises OSError."""
    if host == "":
        return [(socket.AF_INET6, "::")] if has_ipv6() else [(socket.AF_INET, "0.0.0.0")]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))


def has_ipv6() -> bool:
    """Whether this machine can listen on IPv6. The kernel may be built without IPv6, or have it turned off."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(("::", 0))
    except OSError:
        return False
    return True


def own_hosts() -> list[str]:
    """Return this machine's source addresses for its default routes, at most one per family."""
    found: list[str] = []
    for family, target in PROBED.items():
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            found.append(str(sock.getsockname()[0]))
    return [host for host in found if may_be_advertised(host)]


def advertised_hosts(listen: Address, own: list[str]) -> list[str]:
    """Return the ``own`` addresses at which a listener bound to ``listen`` can be reached."""
    host = listen[0]
    if host in ("", "::"):
        return own
    if host == "0.0.0.0":
        return [h for h in own if ":" not in h]
    return [host] if may_be_advertised(host) else []
