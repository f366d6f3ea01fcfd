"""Which user's process listens at an address of this machine. Another user may have taken the port of a dead daemon, and must not get the bearer token."""

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
    """The user whose process answers at ``url``, if that is neither ``owner`` nor root; None also where it cannot be seen, as on another machine."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        wanted = {ipaddress.ip_address(text) for text in (_LOCALHOST if host == "localhost" else (host,))}
    except ValueError:
        return None
    users = {user for address, at, user in _listening() if at == port and (address in wanted or address.is_unspecified)}
    return min(users - {0, owner}, default=None)


def _listening() -> Iterator[tuple[Address, int, int]]:
    """Address, port and user of each socket that listens, by the kernel's tables (proc_net_tcp in the kernel's documentation)."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    yield _address(address), int(port, 16), int(fields[7])


def _address(text: str) -> Address:
    """From words of 32 bits, each in this machine's order (little-endian on all that p2pcast runs on)."""
    words = bytes.fromhex(text)
    return ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
