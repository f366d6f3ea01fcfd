"""Names of nodes, as people type them. Pure.

Promises: no name can be taken for a node's id, for the hub, or for a name that the hub has made; what is printed of a name changes no terminal.
"""

from __future__ import annotations

import re

from p2pcast.errors import RefusedError

MAX_NAME = 128
"""Characters."""
MARK = "~"
"""Between a name that another node has and the beginning of a node's id: such names are the hub's to give."""
HUB = "hub"
_LIKE_AN_ID = re.compile(r"[0-9a-f]{8,32}", re.ASCII | re.IGNORECASE)
"""An id has 32 hexadecimal digits; eight are enough for people to cut one short."""
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


def is_id(text: str) -> bool:
    """Whether ``text`` is a whole id, as hub and peers print it."""
    return _ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether a node may ask for it."""
    return _fault(text) is None


def check_name(name: str) -> str:
    """``name``, which a node may ask for. Raises RefusedError, with the remedy."""
    if fault := name_fault(name):
        raise RefusedError(fault)
    return name


def name_fault(name: str) -> str | None:
    """Why no node may ask for it, with the remedy."""
    fault = _fault(name)
    return None if fault is None else f"the name {shown(name)} {fault}: choose another one (--name)"


def default_name(host: str) -> str:
    """A name for a node on ``host``. Containers are often called by hexadecimal digits alone."""
    kept = "".join(c for c in host if c.isprintable() and c != MARK).strip()[: MAX_NAME - 5]
    return kept if _fault(kept) is None else f"host-{kept}"


def marked(name: str, node: str, digits: int) -> str:
    """What a node goes by while another one has ``name``. ``node``: its id."""
    return f"{name[: MAX_NAME - digits - 1]}{MARK}{node[:digits]}"


def shown(name: str) -> str:
    """For an error or a log line."""
    return repr(name[:MAX_NAME])


def _fault(name: str) -> str | None:
    if not name:
        return "is empty"
    if len(name) > MAX_NAME:
        return f"has more than {MAX_NAME} characters"
    if _LIKE_AN_ID.fullmatch(name):
        return "looks like a node's id (8 to 32 hexadecimal digits and nothing else)"
    if name != name.strip() or not name.isprintable():
        return "has invisible characters"
    if name.casefold() == HUB:
        return "means the hub"
    if MARK in name:
        return f"has a {MARK!r}, which only the hub puts into names"
    return None
