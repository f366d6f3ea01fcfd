"""Network addresses: parsing, printing, and whether an address is meaningful to other machines. No I/O.

The text form is ``HOST:PORT`` with a name or an IPv4 address, or ``[ADDRESS]:PORT`` with an IPv6 address. An IPv6
address without brackets is refused, because its end is ambiguous. A link-local address is refused, because it has a
meaning on one machine only.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from p2pcast.ground.errors import UsageError

Address: TypeAlias = tuple[str, int]
"""Host (a name or a plain IP address, without brackets) and port."""
Family: TypeAlias = Literal[4, 6]

ANYWHERE = ("", "0.0.0.0", "::")
"""Hosts that stand for every address of this machine; the first one for both families."""

MAX_HOST = 253
"""Most characters of a DNS name (RFC 1035, section 2.3.4, without the byte of the root label)."""
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_BRACKETED = re.compile(r"\[([^\[\]]*)\](?::(.*))?")


def parse_address(text: str, *, default_host: str | None = None, default_port: int | None = None) -> Address:
    """Parse ``HOST:PORT`` or ``[ADDRESS]:PORT``. Given a default host, also accepts ``:PORT`` and ``PORT``; given a
    default port, also a host without a port. Raises UsageError.
    """
    wrong = UsageError(f"{text!r} is not an address: write HOST:PORT, or [ADDRESS]:PORT for IPv6")
    bracketed = _BRACKETED.fullmatch(text)
    if bracketed is not None:
        host, port = _ipv6(bracketed[1], text), bracketed[2]
    elif "://" in text:
        raise UsageError(f"{text!r} is a URL: write HOST:PORT alone")
    elif text.count(":") > 1:
        raise UsageError(f"{text!r} is ambiguous: an IPv6 address goes in brackets, as in [::1]:7077")
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


def http_url(text: str, what: str) -> str:
    """Check a base URL and return it without a trailing slash. ``what``: the name of the text in errors. Raises
    UsageError.
    """
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.port != 0
        host = (parts.hostname or "").encode("idna") if known else b""
    except ValueError:
        host = b""
    if not host or not text.isprintable() or " " in text:
        raise UsageError(f"{what}: {text!r} is not a URL: write http://HOST:PORT")
    return text.rstrip("/")


def _ipv6(host: str, text: str) -> str:
    if "%" in host:
        raise UsageError(
            f"{text!r} has a scope, which is valid on one host only: give a global or unique-local address"
        )
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        raise UsageError(f"{text!r}: {host!r} is not an IPv6 address") from None
    if address.is_link_local:
        raise UsageError(
            f"{text!r} is link-local, which is valid on one host only: give a global or unique-local address"
        )
    return str(address.ipv4_mapped or address)


def is_host(text: str) -> bool:
    """Whether a host sent by another node may be dialled and forwarded: it must be empty (not given), an IP address
    without a scope, or a DNS name.

    Resolvers treat a name whose last label is a number as an IPv4 address (127.1, 0x7f000001). Such a name is accepted
    only as a complete IPv4 address.
    """
    if not text or _ip(text) is not None:
        return "%" not in text
    labels = text.removesuffix(".").split(".")
    return len(text) <= MAX_HOST and all(map(_LABEL.fullmatch, labels)) and not _NUMBER.fullmatch(labels[-1])


def unscoped(host: str) -> str:
    """Return a socket's address without its scope, which is meaningful only on this machine."""
    return host.partition("%")[0]


def show_address(host: str, port: int) -> str:
    """Return the text form that ``parse_address`` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """Return a socket's address, converting ``::ffff:10.0.0.1`` (IPv4-mapped) to 10.0.0.1. A scope is kept."""
    address = _ip(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)


def family_of(host: str) -> Family | None:
    """Return the family of an IP address, or None for a name, which may have addresses in both families."""
    address = _ip(host)
    if address is None:
        return None
    return 4 if address.version == 4 else 6


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback IP address; False for names."""
    address = _ip(plain_host(host))
    return address is not None and address.is_loopback


def may_be_advertised(host: str) -> bool:
    """Whether an address of this machine may be meaningful to others: not unspecified, link-local or multicast."""
    address = _ip(host)
    return address is not None and not (address.is_unspecified or address.is_link_local or address.is_multicast)


def site_of(host: str) -> str:
    """Return the site of an address as seen from outside: an IPv4 address itself, or the /64 of an IPv6 address. Hosts
    on the same site can probably reach each other at their own addresses.
    """
    address = _ip(host)
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        return str(ipaddress.IPv6Network((address.packed[:8] + bytes(8), 64)))
    return host


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
