"""Decides which version an engine counts as serving, from its worker's statement and the hub's knowledge. Pure.

Guarantees: no engine counts for a version newer than the hub knows it to serve, or newer than its worker states. If the
hub does not know an engine, its worker's statement counts.
"""

from __future__ import annotations

from typing import NamedTuple

from p2pcast.ground.version import Version


class EngineId(NamedTuple):
    """``node``: the peer that installs the engine's weights, in hex. ``name``: the engine's name at that peer."""

    node: str
    name: str


class KnownEngine(NamedTuple):
    """What the engine's peer reported to the hub. ``served``: None without verified weights. ``staged``: the peer's."""

    served: Version | None
    staged: Version | None


class Believed(NamedTuple):
    """``served``: None for an engine without weights. ``agreed``: whether the statement matches the hub's knowledge, or
    the hub has none.
    """

    served: Version | None
    staged: Version | None
    agreed: bool


def believed(served: Version, staged: Version | None, known: KnownEngine | None) -> Believed:
    """Combine the worker's statement (``served``, ``staged``) with what the hub knows."""
    if known is None:
        return Believed(served, staged, True)
    return Believed(_older(served, known.served), _older(staged, known.staged), served == known.served)


def _older(one: Version | None, other: Version | None) -> Version | None:
    return None if one is None or other is None else min(one, other)
