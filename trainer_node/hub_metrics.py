"""Names, texts and labels of the hub's metrics. docs/reference/metrics.md explains each metric."""

from __future__ import annotations

from functools import partial

from p2pcast.process.metric_kinds import SECONDS, Histogram, counter, counters, gauge, gauges, optional

PEERS = partial(gauge, "p2pcast_hub_peers", "Peers joined")
_LEVELS = "0 well, 1 on its way, 2 a trouble that may pass, 3 needs an operator"
RUN_LEVEL = partial(gauge, "p2pcast_hub_level", f"Verdict on the run: {_LEVELS}")
PEER_LEVEL = partial(gauges, "p2pcast_hub_peer_level", f"Verdict on a peer: {_LEVELS}", ["peer"])
LOST_PEERS = partial(gauge, "p2pcast_hub_lost_peers", "Peers that were lost in the last day, and are not back")
INVALID_REPORTS = partial(counter, "p2pcast_hub_odd_reports", "Reports of which the hub ignored an invalid value")
BARRIER_OUTCOMES = partial(
    counters, "p2pcast_hub_barrier_outcomes", "Ends and failures of the barrier's rounds", ["outcome"]
)
UPLINK = partial(gauge, "p2pcast_hub_uplink_bits_per_second", "The hub's uplink, as planned with")

# -- versions
VERSION_STEP = partial(optional, "p2pcast_hub_version_step", "Step of the newest version")
DELTA_BYTES = partial(optional, "p2pcast_hub_delta_bytes", "Size of the newest version's artifact")
DELTA_RATIO = partial(optional, "p2pcast_hub_delta_ratio", "Dense size over the newest artifact's")
ENCODE_SECONDS = partial(optional, "p2pcast_hub_encode_seconds", "Time to encode the newest version")
TIME_TO_LAST = partial(optional, "p2pcast_hub_time_to_last_seconds", "From publishing to the last peer's staging")
PUBLISH_TO_STAGED = partial(
    Histogram,
    "p2pcast_hub_publish_to_staged_seconds",
    "From the beginning of a version's publishing to a peer's report that it is staged, by the hub's clock",
    ["peer"],
    SECONDS,
)
PUBLISH_TO_LIVE = partial(
    Histogram,
    "p2pcast_hub_publish_to_live_seconds",
    "From the beginning of a version's publishing to the report that an engine serves it, by the hub's clock",
    ["peer", "engine"],
    SECONDS,
)
SKIPPED_FOLDERS = partial(gauge, "p2pcast_hub_skipped_folders", "Checkpoint folders that could not be published")
KEPT_BYTES = partial(counter, "p2pcast_hub_kept_bytes", "Whole states and squashes made beside live traffic")
GAP = partial(gauge, "p2pcast_hub_gap", "Whether no artifacts lead a new peer to the newest version")

# -- peers and their engines
CHAINS = partial(gauge, "p2pcast_hub_chains", "Chains in the plan")
BLAMED_PEERS = partial(gauge, "p2pcast_hub_blamed_peers", "Peers that feed no other peer because they sent garbage")
WITHHOLDING_PEERS = partial(
    gauge,
    "p2pcast_hub_withholding_peers",
    "Peers that feed no other peer because they did not pass on what was sealed",
)
DETACHED_PEERS = partial(gauge, "p2pcast_hub_detached_peers", "Peers too slow to be waited for")
PEER_SCORE = partial(gauges, "p2pcast_hub_peer_score", "Score of a peer (ECHO-2)", ["peer"])
PEER_SCORE_PART = partial(gauges, "p2pcast_hub_peer_score_part", "Parts of a peer's score", ["peer", "part"])
PEER_STANDING = partial(
    gauges,
    "p2pcast_hub_peer_standing",
    "Standing of a peer: 0 any place, 1 heads no chain, 2 a tail, 3 feeds no other peer",
    ["peer"],
)
PEER_RATE = partial(
    gauges,
    "p2pcast_hub_peer_bits_per_second",
    "Least known rate at which a peer receives and passes on, in bit/s; 0 while unknown",
    ["peer"],
)
ENGINE_LAG = partial(
    gauges, "p2pcast_hub_lag_versions", "Versions published since the one that an engine uses", ["peer", "engine"]
)
ENGINE_READY = partial(gauges, "p2pcast_hub_engine_ready", "Whether an engine is fit for traffic", ["peer", "engine"])

# -- the mirror
MIRROR_LAG = partial(gauge, "p2pcast_hub_mirror_lag_versions", "Versions that the mirror does not lead to yet")
MIRROR_ARTIFACTS = partial(gauge, "p2pcast_hub_mirror_artifacts", "Artifacts that are ready on the mirror")
MIRROR_PENDING = partial(gauge, "p2pcast_hub_mirror_pending_bytes", "Bytes that the mirror lacks")
MIRROR_UPLOADED = partial(counter, "p2pcast_hub_mirror_uploaded_bytes", "Bytes uploaded to the mirror")
MIRROR_REPAIRED = partial(
    counter, "p2pcast_hub_mirror_mended", "Objects of the mirror that were wrong, and were written again"
)
MIRROR_ERRORS = partial(counter, "p2pcast_hub_mirror_errors", "Requests to the mirror that failed")
