"""Addresses: as people write them, as sockets give them, and as others are told of them. No I/O.

``HOST:PORT`` with a name or an IPv4 address, ``[ADDRESS]:PORT`` with an IPv6 address: an IPv6 address without brackets is refused, because nobody can tell
where it ends. Link-local addresses are refused too: what they mean depends on the host, so one that is passed on is wrong.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, TypeAlias

from p2pcast.errors import UsageError

Address: TypeAlias = tuple[str, int]
"""Host (a name or a plain IP address, without brackets) and port."""
Family: TypeAlias = Literal[4, 6]

ANYWHERE = ("", "0.0.0.0", "::")
"""Hosts that mean every address of this machine; the first in both families, as far as it has them."""

MAX_HOST = 253
"""Characters of a DNS name (RFC 1035, section 2.3.4, without the root's own byte)."""
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?")


def parse_address(text: str, *, default_host: str | None = None, default_port: int | None = None) -> Address:
    """``HOST:PORT`` or ``[ADDRESS]:PORT``; with a default host also ``:PORT`` and ``PORT``, with a default port also the host alone.

    Raises UsageError.
    """
    wrong = UsageError(f"{text!r} is not an address: write HOST:PORT, or [ADDRESS]:PORT for IPv6")
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed is not None:
        host, port = _ipv6(bracketed[1], text), bracketed[2]
    elif "://" in text:
        raise UsageError(f"{text!r} is a URL: write HOST:PORT alone")
    elif text.count(":") > 1:
        raise UsageError(f"{text!r} is not clear: an IPv6 address goes in brackets, as in [::1]:7077")
    elif ":" in text or not (text.isascii() and text.isdigit()):
        host, colon, after = text.partition(":")
        port = after if colon else None
    else:
        host, port = "", text
    if port is None and default_port is not None:
        port = str(default_port)
    if port is None or not (port.isascii() and port.isdigit()) or int(port) > 65535 or any(c in "[] /" for c in host):
        raise wrong
    if not host:
        if default_host is None:
            raise wrong
        host = default_host
    if not is_host(host):
        raise UsageError(f"{text!r}: {host!r} is neither an IP address nor a host name")
    return host, int(port)


def _ipv6(host: str, text: str) -> str:
    if "%" in host:
        raise UsageError(f"{text!r} has a scope, which means something on one host alone: give a global or unique-local address")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise UsageError(f"{text!r}: {host!r} is not an IPv6 address") from None
    if address.is_link_local:
        raise UsageError(
            f"{text!r} is link-local, which means something on one host alone: give a global or unique-local address"
        )
    return str(address.ipv4_mapped or address)


def is_host(text: str) -> bool:
    """Whether a host from another node may be dialled and passed on: empty (unstated), an IP address without a scope, or a DNS name.

    Resolvers take a name whose last label is a number for an IPv4 address (127.1, 0x7f000001), so such a name counts only as a whole address.
    """
    if not text or _ip(text) is not None:
        return "%" not in text
    labels = text.removesuffix(".").split(".")
    return len(text) <= MAX_HOST and all(map(_LABEL.fullmatch, labels)) and not _NUMBER.fullmatch(labels[-1])


def unscoped(host: str) -> str:
    """An address as sockets give it, without its scope: the scope names an interface of this machine alone."""
    return host.partition("%")[0]


def show_address(host: str, port: int) -> str:
    """As ``parse_address`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """As a socket gives it, without what is said of the socket: ``::ffff:10.0.0.1`` is 10.0.0.1 on a socket of both families. A scope stays."""
    address = _ip(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)


def family_of(host: str) -> Family | None:
    """None for a name, which may have addresses of both."""
    address = _ip(host)
    if address is None:
        return None
    return 4 if address.version == 4 else 6


def is_loopback(host: str) -> bool:
    """Of an IP address; names are none."""
    address = _ip(plain_host(host))
    return address is not None and address.is_loopback


def may_be_told(host: str) -> bool:
    """Whether an address of this machine means the same to others, or may: not the unspecified, and no link-local one."""
    address = _ip(host)
    return address is not None and not (address.is_unspecified or address.is_link_local or address.is_multicast)


def site_of(host: str) -> str:
    """Where an address is, as seen from outside: behind one IPv4 address, or in one /64, hosts are likely to reach each other by their own addresses."""
    address = _ip(host)
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return str(ipaddress.IPv6Network((address.packed[:8] + bytes(8), 64)))
    return host


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
