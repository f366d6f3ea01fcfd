"""Decides, in this one place, which artifacts need a source and which source is asked. It does no I/O.

| the artifact | is asked of |
|---|---|
| is complete, or a source sends it | no source |
| is being pulled | no other source |
| is offered by the parent; the hub has not sealed it, or it is small | the parent |
| is offered by the parent, sealed and large | peers, the parent among them |
| is on the mirror that is in use | the mirror, which asks ``due_from_mirror`` |
| is sealed, and the parent will not push it | peers |
| is none of these | no source yet: the parent may still push it |
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from p2pcast.ground import limits
from p2pcast.relay.holding import Holding

SMALL_BYTES = 256 * limits.KIB
"""A sealed artifact up to this size comes from the parent that offers it, because finding other sources would take as
long. Its transfer delays a version that is being received by at most 20 ms at 100 Mbit/s.
"""
MIRROR_PATIENCE_S = 5.0
"""Seconds for which a connected parent may leave out an artifact that the mirror lists."""


class SourceChoice(Enum):
    NONE = auto()
    """This artifact needs no action."""
    LATER = auto()
    """The artifact is missing, and the choice may change."""
    PARENT = auto()
    PEERS = auto()


def needs_source(holding: Holding | None) -> bool:
    """Whether any part of the artifact is missing and no source is sending it."""
    return holding is None or holding.needs_source


def choose_source(
    holding: Holding | None,
    *,
    pulled: bool,
    offered: bool,
    sealed_bytes: int | None,
    mirrored: bool,
    overdue: Callable[[], bool],
) -> SourceChoice:
    """``pulled``: whether the downloader is already fetching the artifact. ``offered``: whether the parent offers it.
    ``sealed_bytes``: its size if the hub has sealed it, otherwise None. ``overdue``: returns whether the parent will
    not push it; called only if that matters.
    """
    if not needs_source(holding):
        return SourceChoice.NONE
    if pulled:
        return SourceChoice.LATER
    if offered:
        return SourceChoice.PARENT if sealed_bytes is None or sealed_bytes <= SMALL_BYTES else SourceChoice.PEERS
    if sealed_bytes is not None and not mirrored and overdue():
        return SourceChoice.PEERS
    return SourceChoice.LATER


def due_from_mirror(holding: Holding | None, *, pulled: bool, has_parent: bool, listed_for_s: float) -> bool:
    """Whether to ask the mirror for an artifact that it has listed for ``listed_for_s`` seconds."""
    return needs_source(holding) and not pulled and (not has_parent or listed_for_s > MIRROR_PATIENCE_S)
