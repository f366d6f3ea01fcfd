"""The settings of a hub; `p2pcast seed` makes them from its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2pcast.checkpoint.folder_form import DEFAULT as STEP_FOLDERS
from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.ground.limits import SHADOW_KEPT_DAYS
from p2pcast.store.retention import DEFAULT as KEPT
from p2pcast.store.retention import Counts
from p2pcast.transport.socket_options import Sockets
from p2pcast.transport.stripe import DEFAULT
from p2pcast.trust.token_register import OWN_TTL_S
from trainer_node.admission.admission import LIFETIME_S
from trainer_node.restart_recovery import RECALL_S

DEFAULT_PORT = 7077
DEFAULT_HTTP_PORT = 7078


@dataclass(frozen=True, slots=True)
class HubConfig:
    checkpoints: Path | None
    """None: all versions come from a trainer's ranks."""
    state: Path
    shadow: Path
    shadow_days: float = SHADOW_KEPT_DAYS
    """Days for which shadows of this user that no daemon uses are kept."""
    folder_form: FolderForm = STEP_FOLDERS
    """Names and markers of the folders in ``checkpoints``."""
    base: Path | None = None
    quantise: str | None = None
    """Kind of quantised state that folders are published as (``p2pcast.quantised.quantisation_kinds``)."""
    listen: tuple[str, int] = ("", DEFAULT_PORT)
    advertise: tuple[str, int] | None = None
    http: tuple[str, int] = ("127.0.0.1", DEFAULT_HTTP_PORT)
    http_per_address: int | None = None
    """Open HTTP connections of one address; None: ``HttpLimits``."""
    uplink_bps: float | None = None
    """Stated uplink in bit/s; None: measured, and `DEFAULT_UPLINK_BPS` until then."""
    chains: int | None = None
    peer_cap_bps: float | None = None
    """Rate that counts as full speed in scores, in bit/s; None: the fastest peer's."""
    region: str = ""
    """The hub's region. Peers of another region are taken to share one link into that region."""
    commit: str = "auto"
    barrier_timeout_s: float = 30.0
    barrier_quorum: float = 0.9
    codec: str = "auto"
    max_lag: int | None = None
    """No version begins while a peer is more versions behind than this."""
    max_lag_wait_s: float = 300.0
    """Longest time for which one peer may hold back versions, in seconds; 0: no limit."""
    rank_timeout_s: float = 600.0
    """Longest time for which a rank may keep the others of its group waiting, in seconds; 0: no limit."""
    squashes: bool = True
    """Squashed deltas are kept ready for late peers, and made on request."""
    anchor_every: int | None = None
    """Versions between whole states; None: ``retention.ANCHOR_EVERY``."""
    counts: Counts = KEPT
    """Deltas and anchors that stay on disk, and on the mirror."""
    token_file: Path | None = None
    mirror: str | None = None
    """URL of an object store for a copy of the run."""
    mirror_bps: float | None = None
    """Upload rate to the mirror, in bit/s; None: the rate that live traffic leaves."""
    sockets: Sockets = DEFAULT
    plaintext: bool = False
    """Links without TLS, and one token for all nodes."""
    recall_s: float = RECALL_S
    """Time after a restart, in seconds, in which no version opens unless the last process's peers are back: they may
    know versions newer than this state has.
    """
    certificate_s: float = LIFETIME_S
    """Lifetime of a certificate, in seconds."""
    token_ttl_s: float = OWN_TTL_S
    """Lifetime of the token in the token file, in seconds; a fresh one replaces it after half of that."""
