"""What a peer is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.store.retention import AT_A_PEER, Counts
from p2pcast.transport.sockets import Sockets
from p2pcast.transport.stripe import DEFAULT
from p2pcast.wire.token import Token
from rollout_node.catching_up import Squashes
from rollout_node.targets import Driver, Kv, Role


@dataclass(frozen=True, slots=True)
class PeerConfig:
    hub: tuple[str, int] | None
    """None: there is only the mirror."""
    token: Token
    targets: tuple[str, ...]
    state: Path
    shadow: Path
    name: str
    base: Path | None = None
    region: str = ""
    listen: tuple[str, int] = ("", 0)
    advertise: tuple[tuple[str, int], ...] = ()
    """None: as the hub sees this peer, and addresses of its own."""
    http: tuple[str, int] = ("127.0.0.1", 0)
    stripes: int | None = None
    """TCP connections of a link; None: by p2pcast.transport.striping."""
    sockets: Sockets = DEFAULT
    kv: Kv = "recompute"
    keep: int = 3
    """Versions that a folder of versions (``safetensors:DIR``) keeps."""
    counts: Counts = AT_A_PEER
    """Artifacts that stay on disk."""
    driver: Driver = "peer"
    """Who switches the engines: this peer, or somebody who calls POST /commit."""
    rolling: int | None = None
    """At most so many engines are being switched at one time; None: all."""
    callbacks: Any = None
    """An object or module with ``before_commit`` or ``after_commit``: rollout_node.callbacks."""
    max_defer_s: float = 10.0
    engine: tuple[str, Role] | None = None
    """For an engine whose workers run on several hosts: its name, and what this peer is there."""
    squashes: Squashes = "auto"
    """What is made of squashed deltas when this peer is late: rollout_node.catching_up."""
    plaintext: bool = False
    """Links without TLS. The token says which it is."""
    join_timeout_s: float = 60.0
    """Time for which a first join keeps trying a hub that is out of reach; 0: for ever."""
    max_age_s: float | None = None
    """Greatest age of what the peer knows of the newest version, beyond which the peer is unready; None: no limit."""
    mirror: str | None = None
    """URL of the object store to turn to where no hub is in reach."""
