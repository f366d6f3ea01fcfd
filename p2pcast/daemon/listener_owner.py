"""The user whose process listens at an address of this machine. After a daemon dies, another user may bind its port;
that process must not receive the bearer token.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"
_LOCALHOST = ("127.0.0.1", "::1")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def foreign_listener(url: str, owner: int) -> int | None:
    """The id of the user whose process listens at ``url``, unless that user is ``owner`` or root. None also where the
    listener cannot be seen, as on another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        wanted = {ipaddress.ip_address(text) for text in (_LOCALHOST if host == "localhost" else (host,))}
    except ValueError:
        return None
    users = {user for address, at, user in _listening() if at == port and (address in wanted or address.is_unspecified)}
    return min(users - {0, owner}, default=None)


def _listening() -> Iterator[tuple[Address, int, int]]:
    """Address, port and user id of each listening socket, from /proc/net (``proc_net_tcp`` in the kernel's
    documentation).
    """
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield _address(address), int(port, 16), int(fields[7])


def _address(text: str) -> Address:
    """An address from /proc/net: 32-bit words in hex, each in host order. All supported ones are little-endian."""
    words = bytes.fromhex(text)
    return ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
