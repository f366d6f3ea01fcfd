"""Roles of nodes, and the table of permissions: the roles that may dial and accept a connection of each purpose.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["hub", "peer", "trainer", "worker", "ledger"]
BOUGHT: tuple[Role, ...] = ("peer", "trainer", "worker", "ledger")
"""Roles that a join token can give. The hub issues its own certificate."""
SERVERS: frozenset[Role] = frozenset({"hub", "peer", "ledger"})
"""Roles whose holders accept connections. Workers and a trainer dial a ledger over HTTPS; ``DIALERS`` and
``LISTENERS`` give workers and ledgers no connection of p2pcast's own protocol but the enrolment.
"""

ENROL = "enrol"
"""Purpose of a node's first connection, on which the node has no certificate yet."""

DIALERS: dict[str, frozenset[str]] = {
    "control": frozenset({"peer"}),
    "data": frozenset({"hub", "peer"}),
    "publish": frozenset({"trainer"}),
    "engine": frozenset({"peer"}),
}
"""Purpose → roles that may dial such a connection."""
LISTENERS: dict[str, frozenset[str]] = {
    "control": frozenset({"hub"}),
    "data": frozenset({"hub", "peer"}),
    "publish": frozenset({"hub"}),
    "engine": frozenset({"peer"}),
}
"""Purpose → roles that may accept such a connection."""


@dataclass(frozen=True, slots=True)
class Certified:
    """The holder that a certificate names: run id, node id, role."""

    run: bytes
    node: bytes
    role: str
