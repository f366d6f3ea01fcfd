"""What the hub knows of a peer: its JOIN, its last report, and measurements. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from p2pcast.codec.codec_prediction import PEER_CORES
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Report
from topology.plan_tree import ROOT, Epoch
from topology.reachability import Contact
from topology.score import Transfers
from trainer_node.membership.engine_reports import EngineRow

NO_REPORT: Final = Report(None, None, None, transfer=None, inflow=None, link=None, progress=None, error=None)
"""Placeholder for the report of a peer that has not sent one yet."""


@dataclass(slots=True)
class PeerRecord:
    """``ident``: the peer's node in hex, which the planner uses as id. ``joined_at``: monotonic time in seconds."""

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
    report: Report = field(default_factory=lambda: NO_REPORT)
    engines: list[EngineRow] = field(default_factory=list)
    """The engines in its last report."""
    sent_epoch: Epoch = (0, 0)
    """Epoch of the newest plan that changed something for this peer."""
    site: str = ""
    ways: tuple[Contact, ...] = ()
    """The peer's addresses; empty if its reachability is unknown."""
    families: tuple[int, ...] = (4, 6)
    """IP versions of the addresses that it can dial."""
    holds_more: bool = False
    """Whether the peer has reported artifacts that this hub did not have."""
    beside_hub: bool = False
    """Whether the peer runs on the hub's machine."""

    @property
    def dialled_by_parent(self) -> bool:
        """Whether its parent dialled it, according to its last report."""
        return self.report.link is not None and self.report.link.get("dialled_by") == "parent"

    @property
    def place(self) -> tuple[bytes, str, int]:
        """The peer's node and address."""
        return bytes.fromhex(self.ident), self.host, self.port

    @property
    def cores(self) -> int:
        """Number of cores that it decodes with; PEER_CORES until the peer has reported it."""
        return PEER_CORES if self.report.cores is None else self.report.cores
