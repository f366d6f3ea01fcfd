"""The options of a peer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.checkpoint.folder_form import DEFAULT as STEP_FOLDERS
from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.ground.limits import SHADOW_KEPT_DAYS
from p2pcast.rollouts.kv_policy import KvPolicy
from p2pcast.store.retention import AT_A_PEER, Counts
from p2pcast.transport.socket_options import Sockets
from p2pcast.transport.stripe import DEFAULT
from p2pcast.trust.join_token import JoinToken
from rollout_node.engine.install_target import NO_WAIT, Role, Wait
from rollout_node.installers.installer import Driver
from rollout_node.sync.catchup_choice import Squashes


@dataclass(frozen=True, slots=True)
class PeerConfig:
    hub: tuple[str, int] | None
    """None: the run has no hub, only a mirror."""
    token: JoinToken
    targets: tuple[str, ...]
    state: Path
    shadow: Path
    name: str
    shadow_days: float = SHADOW_KEPT_DAYS
    """Days for which shadows of this user that no daemon uses are kept."""
    base: Path | None = None
    quantise: str | None = None
    """Kind of quantised state that the engines take (``p2pcast.quantised.quantisation_kinds``); None: as published."""
    region: str = ""
    listen: tuple[str, int] = ("", 0)
    advertise: tuple[tuple[str, int], ...] = ()
    """Addresses that other nodes dial; empty: the address that the hub sees, and those of this machine."""
    http: tuple[str, int] = ("127.0.0.1", 0)
    http_per_address: int | None = None
    """Open HTTP connections of one address; None: ``HttpLimits``."""
    stripes: int | None = None
    """TCP connections of a link; None: chosen by p2pcast.transport.stripe_count."""
    sockets: Sockets = DEFAULT
    kv: KvPolicy = "recompute"
    wait: Wait = NO_WAIT
    """The state of a vLLM engine in which it may switch."""
    keep: int = 3
    """Number of versions that an install folder (``safetensors:DIR``) keeps."""
    folder_form: FolderForm = STEP_FOLDERS
    """Names and markers of the folders in an install folder."""
    counts: Counts = AT_A_PEER
    """Number of artifacts that stay on disk."""
    driver: Driver = "peer"
    """The driver of the engines' switches: this peer, or a caller of POST /commit."""
    rolling: int | None = None
    """Largest number of engines that are switched at one time; None: all."""
    callbacks: Any = None
    """An object or module with ``before_commit`` or ``after_commit``: rollout_node.engine.callbacks."""
    max_defer_s: float = 10.0
    """Largest sum of a callback's deferrals of one version at one engine, in seconds."""
    engine: tuple[str, Role] | None = None
    """For an engine whose workers run on several hosts: its name, and this peer's role."""
    squashes: Squashes = "auto"
    """Use of squashed deltas when this peer is behind: rollout_node.sync.catchup_choice."""
    plaintext: bool = False
    """Links without TLS; the token must say the same."""
    join_timeout_s: float = 60.0
    """Time for which a first join retries while the hub is out of reach, in seconds; 0: no limit."""
    max_age_s: float | None = None
    """Age of the last news of the newest version beyond which the peer is unready, in seconds; None: no limit."""
    mirror: str | None = None
    """URL of the object store that serves versions while no hub is in reach."""
