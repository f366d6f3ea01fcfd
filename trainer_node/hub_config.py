"""What a hub is started with; where each comes from is `p2pcast seed`'s business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2pcast.store.retention import DEFAULT as KEPT
from p2pcast.store.retention import Counts
from p2pcast.transport.sockets import Sockets
from p2pcast.transport.stripe import DEFAULT
from p2pcast.trust.ledger import OWN_TTL_S
from trainer_node.admission import LIFETIME_S
from trainer_node.recall import RECALL_S

DEFAULT_PORT = 7077
DEFAULT_HTTP_PORT = 7078


@dataclass(frozen=True, slots=True)
class HubConfig:
    checkpoints: Path | None
    """None: versions come from a trainer's ranks alone."""
    state: Path
    shadow: Path
    base: Path | None = None
    listen: tuple[str, int] = ("", DEFAULT_PORT)
    advertise: tuple[str, int] | None = None
    http: tuple[str, int] = ("127.0.0.1", DEFAULT_HTTP_PORT)
    uplink_bps: float | None = None
    """Stated; else it is measured, and until then taken for `DEFAULT_UPLINK_BPS`."""
    chains: int | None = None
    peer_cap_bps: float | None = None
    """The most that a peer may send, which is full speed in scores; None: the fastest peer's rate."""
    region: str = ""
    """Peers that join with another label are taken to share the way into theirs."""
    commit: str = "auto"
    barrier_timeout_s: float = 30.0
    barrier_quorum: float = 0.9
    codec: str = "auto"
    max_lag: int | None = None
    """No version begins while a peer is more versions behind than this."""
    max_lag_wait_s: float = 300.0
    """Time for which one peer may hold back versions, in seconds; 0: no limit."""
    rank_timeout_s: float = 600.0
    """Time for which a rank may keep the others of its group waiting, in seconds; 0: no limit."""
    squashes: bool = True
    """Squashed deltas are kept ready for late peers, and made for those that ask."""
    anchor_every: int | None = None
    """Versions between whole states; None: ``retention.ANCHOR_EVERY``."""
    counts: Counts = KEPT
    """Deltas and anchors that stay on disk, and on the mirror."""
    token_file: Path | None = None
    mirror: str | None = None
    """URL of an object store that is to hold a copy of the run."""
    mirror_bps: float | None = None
    """What the copy may take of the uplink; None: what live traffic leaves."""
    sockets: Sockets = DEFAULT
    plaintext: bool = False
    """Links without TLS, and one token for all."""
    recall_s: float = RECALL_S
    """Time after a restart, in seconds, in which no version opens unless the last process's peers are back: they may know versions newer than this state has."""
    certificate_s: float = LIFETIME_S
    """How long a certificate is in force."""
    token_ttl_s: float = OWN_TTL_S
    """Lifetime of the token in the token file; the file gets a fresh one after half of it."""
