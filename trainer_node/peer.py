"""A peer as the hub knows it: what it said when it joined, what it reports, what was measured of it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p2pcast.codec.choice import PEER_CORES
from p2pcast.version import Version
from topology.reach import Contact
from topology.score import Transfers
from topology.tree import ROOT, Epoch
from trainer_node.engines import EngineRow


@dataclass(slots=True)
class Peer:
    """``ident``: its node in hex, the planner's id."""

    ident: str
    name: str
    region: str
    host: str
    port: int
    joined_at: float
    transfers: Transfers = field(default_factory=Transfers)
    staged: Version | None = None
    committed: Version | None = None
    parent: str = ROOT
    report: dict[str, Any] = field(default_factory=dict)
    engines: list[EngineRow] = field(default_factory=list)
    """As it last reported them."""
    sent_epoch: Epoch = (0, 0)
    """The newest plan that said something new to it."""
    site: str = ""
    ways: tuple[Contact, ...] = ()
    """Where it may be found; none: nothing is known of who can dial it, or whom it can."""
    families: tuple[int, ...] = (4, 6)
    """Of the addresses that it can dial."""
    beside_hub: bool = False
    """On the hub's machine."""

    @property
    def dialled_by_parent(self) -> bool:
        """As it last reported."""
        return (self.report.get("link") or {}).get("dialled_by") == "parent"

    @property
    def place(self) -> tuple[bytes, str, int]:
        """Its node and address."""
        return bytes.fromhex(self.ident), self.host, self.port

    @property
    def cores(self) -> int:
        """With which it decodes; one that has not said is taken for an ordinary one."""
        said: int = self.report.get("cores", PEER_CORES)
        return said
