"""The version that an engine is taken to serve: its worker's statement, checked against the hub's knowledge. Pure.

Promises: no engine counts for a version that is newer than the hub knows it to serve, or newer than its worker states.
An engine that the hub does not know counts for what its worker states.
"""

from __future__ import annotations

from typing import NamedTuple

from p2pcast.ground.version import Version


class EngineId(NamedTuple):
    """``node``: of the peer that installs the engine's weights, in hex. ``name``: of the engine at that peer."""

    node: str
    name: str


class KnownEngine(NamedTuple):
    """As the engine's peer reported to the hub. ``served``: None without verified weights. ``staged``: by the peer."""

    served: Version | None
    staged: Version | None


class Believed(NamedTuple):
    """``served``: None for an engine without weights. ``agreed``: the statement is the hub's knowledge, or the hub has
    none.
    """

    served: Version | None
    staged: Version | None
    agreed: bool


def believed(served: Version, staged: Version | None, known: KnownEngine | None) -> Believed:
    """``served``, ``staged``: as the worker states."""
    if known is None:
        return Believed(served, staged, True)
    return Believed(_older(served, known.served), _older(staged, known.staged), served == known.served)


def _older(one: Version | None, other: Version | None) -> Version | None:
    return None if one is None or other is None else min(one, other)
