"""Roles of nodes, and what a connection's two ends have to be for its purpose. Pure; the one table of permissions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["hub", "peer", "trainer"]
BOUGHT: tuple[Role, ...] = ("peer", "trainer")
"""Roles that a token may buy. The hub's certificate is its own work."""

ENROL = "enrol"
"""The purpose of a first connection, which has no certificate yet."""

DIALERS: dict[str, frozenset[str]] = {
    "control": frozenset({"peer"}),
    "data": frozenset({"hub", "peer"}),
    "publish": frozenset({"trainer"}),
    "engine": frozenset({"peer"}),
}
"""Purpose → who may begin such a connection."""
LISTENERS: dict[str, frozenset[str]] = {
    "control": frozenset({"hub"}),
    "data": frozenset({"hub", "peer"}),
    "publish": frozenset({"hub"}),
    "engine": frozenset({"peer"}),
}
"""Purpose → who may answer it."""


@dataclass(frozen=True, slots=True)
class Certified:
    """What a certificate says of its holder."""

    run: bytes
    node: bytes
    role: str
