"""The settings of a hub, which are the options of `p2pcast seed`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.cli import shared_settings as shared
from p2pcast.cli.options import Address, RateParameter
from p2pcast.cli.settings import setting
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_KEPT
from p2pcast.quantised.quantisation_kinds import KINDS
from p2pcast.store.retention import ANCHOR_EVERY, RetentionCounts
from p2pcast.transport.socket_options import Sockets

BARRIER_TIMEOUT_S, BARRIER_QUORUM = 30.0, 0.9
RECALL_S = 10.0
"""How long to wait for the last process's peers to return, in seconds: several of their longest retry delays."""
_STATE = shared.state_of("hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """``checkpoints`` is None if all versions come from a trainer's ranks."""

    checkpoints: Path | None = setting(None, argument=True)
    base: Path | None = setting(
        None, "Hugging Face folder of version 0; a peer that has the same folder downloads only deltas."
    )
    quantise: str | None = setting(
        None,
        "Kind of quantised state that CHECKPOINTS and --base are published as, with its scales; for engines that load "
        "this form.  [default: as trained]",
        choices=list(KINDS),
    )
    folder_form: FolderForm = shared.step_folders("in CHECKPOINTS")
    listen: tuple[str, int] = setting(
        ":7077", "Address on which the hub accepts peers and trainer ranks.", type=Address("", 7077)
    )
    advertise: tuple[str, int] | None = setting(None, "Address of the hub in the printed join command.", type=Address())
    http: tuple[str, int] = setting(
        "127.0.0.1:7078", "Address of the HTTP server for status, metrics and commands.", type=Address("127.0.0.1")
    )
    http_per_address: int | None = shared.http_per_address()
    state: Path = setting(text="Folder for the run's key, versions and membership.", absent=_STATE)
    shadow: Path = shared.shadow_of(_STATE)
    shadow_days: float = shared.shadow_days()
    uplink_bps: float | None = setting(
        None,
        "Upload rate of the hub in bits per second, which decides the number of chains.  [default: measured; 1gbit "
        "until then]",
        name="uplink",
        type=RateParameter(),
    )
    chains: int | None = setting(None, "Number of chains.  [default: from --uplink and the peers' measured rates]", 1)
    peer_cap_bps: float | None = setting(
        None,
        "Rate in bits per second that counts as full speed in a peer's score.  [default: the fastest peer's rate, at "
        "least 100mbit]",
        name="peer_cap",
        type=RateParameter(),
    )
    region: str = setting(
        "", "Label of the hub's site. Peers with another label share one WAN path to the hub.", show=False
    )
    commit: Literal["auto", "manual", "barrier"] = setting(
        "auto",
        "When engines switch to a version. auto: once staged; manual: on `p2pcast commit`; barrier: all at once.",
    )
    barrier_timeout_s: float | None = setting(
        None,
        "With --commit barrier: longest wait in seconds, from the first peer that has staged a version.  [default: "
        f"{BARRIER_TIMEOUT_S:g}]",
        above=0,
        name="barrier_timeout",
        metavar="SECONDS",
    )
    barrier_quorum: float | None = setting(
        None,
        "With --commit barrier: share of the peers, 0 to 1, that must have staged the version in time.  [default: "
        f"{BARRIER_QUORUM:g}]",
        0,
        1,
        metavar="SHARE",
    )
    codec: Literal["auto", "context", "flat", "dense"] = setting(
        "auto",
        "Codec of changed cells; auto: for each version, the codec with the earliest last arrival, or a smaller one "
        "that is hardly later.",
    )
    max_lag: int | None = setting(
        None,
        "Greatest lag of any peer's engines, in versions, at which the hub begins another version.  [default: no "
        "limit]",
        0,
    )
    max_lag_wait_s: float = setting(
        300.0, "With --max-lag: longest time in seconds for which one peer may hold back versions; 0: no limit.", 0
    )
    rank_timeout_s: float = setting(
        600.0, "Longest time in seconds for which the trainer's other ranks wait for a missing rank; 0: no limit.", 0
    )
    anchor_every: int | None = setting(
        None,
        f"Number of versions between anchors, the whole states for peers that join late.  [default: {ANCHOR_EVERY}]",
        1,
        MAX_KEPT,
        metavar="N",
    )
    counts: RetentionCounts = shared.retention(RetentionCounts())
    token_file: Path | None = setting(
        None,
        "File for the join token, mode 0600; the hub writes the next token before the last one expires.  [default: "
        "STATE/token]",
        absent=lambda given: _STATE(given) / "token",
    )
    token_ttl_s: float = setting(
        24,
        "Lifetime of a join token in hours; renewed after one half.",
        above=0,
        high=8760,
        name="token_hours",
        unit=3600,
    )
    """Long enough to start a fleet, short enough to limit a leaked copy."""
    squashes: bool = setting(
        False,
        "No squashes (one delta in place of many) for late peers: less disk, slower catch-up.",
        name="no_squashes",
        inverse=True,
    )
    mirror: str | None = setting(
        None, "Object store for a copy of the run: s3://BUCKET/PREFIX or file:///FOLDER.", metavar="URL"
    )
    mirror_bps: float | None = setting(
        None,
        "Constant upload rate to the mirror in bits per second.  [default: in the gaps between broadcasts]",
        name="mirror_rate",
        type=RateParameter(),
        metavar="RATE",
    )
    sockets: Sockets = shared.sockets()
    certificate_s: float = setting(
        14,
        "Certificate lifetime in days; renewed after one third.",
        above=0,
        high=3650,
        name="certificate_days",
        unit=86400,
    )
    recall_s: float = setting(
        RECALL_S,
        "Longest wait in seconds, after a restart, for peers that have versions which the state folder lacks. Ends "
        "early once all former peers are back.",
        0,
        3600,
        name="recall",
        metavar="SECONDS",
    )
    plaintext: bool = shared.plaintext()

    def checked(self) -> HubConfig:
        """Raises UsageError for settings that are incompatible."""
        if self.commit != "barrier" and (self.barrier_timeout_s, self.barrier_quorum) != (None, None):
            raise UsageError("--barrier-timeout and --barrier-quorum need --commit barrier")
        if self.mirror_bps is not None and self.mirror is None:
            raise UsageError("--mirror-rate needs --mirror")
        return self
