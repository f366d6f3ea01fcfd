"""Names of nodes. Pure.

Guarantees: no name looks like a node's id, like the hub, or like a name that the hub has made. A printed name contains
no control characters.
"""

from __future__ import annotations

import re

from p2pcast.ground.errors import RefusedError

MAX_NAME = 128
"""Most characters of a name."""
MARK = "~"
"""Separates a name from part of a node's id in names that the hub makes, when several nodes ask for one name."""
HUB = "hub"
_LIKE_AN_ID = re.compile(r"[0-9a-f]{8,32}", re.ASCII | re.IGNORECASE)
"""Node ids have 32 hexadecimal digits; users may shorten an id to eight."""
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


def is_id(text: str) -> bool:
    """Whether ``text`` is a complete node id."""
    return _ID.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether a node may have this name."""
    return _fault(text) is None


def check_name(name: str) -> str:
    """Return ``name`` if a node may have it. Raises RefusedError, with the remedy."""
    if fault := name_fault(name):
        raise RefusedError(fault)
    return name


def name_fault(name: str) -> str | None:
    """Return why no node may have this name, with the remedy; None if the name is allowed."""
    fault = _fault(name)
    return None if fault is None else f"the name {quoted(name)} {fault}: choose another one (--name)"


def default_name(host: str) -> str:
    """A valid name for a node on ``host``. Container host names often look like node ids and get a prefix."""
    kept = "".join(c for c in host if c.isprintable() and c != MARK).strip()[: MAX_NAME - 5]
    return kept if _fault(kept) is None else f"host-{kept}"


def disambiguated(name: str, node: str, digits: int) -> str:
    """The name of a node while another node has ``name``: with the first ``digits`` digits of its id ``node``."""
    return f"{name[: MAX_NAME - digits - 1]}{MARK}{node[:digits]}"


def quoted(name: str) -> str:
    """A name for an error or a log line: quoted, escaped, of bounded length."""
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
