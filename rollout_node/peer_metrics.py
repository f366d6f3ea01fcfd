"""Names, help texts and labels of a peer's metrics. docs/reference/metrics.md explains each metric."""

from __future__ import annotations

from functools import partial

from p2pcast.process.metric_kinds import PAUSES, SECONDS, Histogram, counter, counters, gauge, gauges, optional

HUB_CONNECTED = partial(gauge, "p2pcast_peer_hub_connected", "Whether the hub is in reach")
LEVEL = partial(
    gauge,
    "p2pcast_peer_level",
    "The peer's verdict on itself: 0 well, 1 on its way, 2 a trouble that may pass, 3 needs an operator",
)
KNOWLEDGE_AGE = partial(gauge, "p2pcast_peer_knowledge_age_seconds", "Age of the last news of the newest version")
STRANDED = partial(gauge, "p2pcast_peer_stranded", "Whether no artifacts lead to the newest version")
CERTIFICATE_END = partial(
    gauge, "p2pcast_peer_certificate_end_timestamp_seconds", "When the certificate ends, unless it is renewed"
)

# -- versions
STAGED_STEP = partial(optional, "p2pcast_peer_staged_step", "Step of the version staged")
COMMITTED_STEP = partial(optional, "p2pcast_peer_committed_step", "Step of the version that all engines use")
OPENED_TO_STAGED = partial(
    Histogram,
    "p2pcast_peer_opened_to_staged_seconds",
    "From a version's first message here to its staging",
    [],
    SECONDS,
)
REFUSED_VERSIONS = partial(counter, "p2pcast_peer_refused_versions", "Versions refused before the shadow changed")
WITHHELD_VERSIONS = partial(
    counter, "p2pcast_peer_withheld_versions", "Versions that the hub had sealed and the parent did not send"
)
HEALED_CELLS = partial(counter, "p2pcast_peer_healed_cells", "Corrupt cells of the shadow that were repaired")
HEALING_BYTES = partial(counter, "p2pcast_peer_healing_bytes", "Piece bytes fetched to put cells right")

# -- engines
ENGINE_READY = partial(gauges, "p2pcast_peer_engine_ready", "Whether an engine holds verified weights", ["engine"])
ENGINE_LAG = partial(
    gauges, "p2pcast_peer_lag_versions", "Versions published since the one that an engine uses", ["engine"]
)
STAGED_TO_LIVE = partial(
    Histogram,
    "p2pcast_peer_staged_to_live_seconds",
    "From a version's staging to an engine that serves it",
    ["engine"],
    SECONDS,
)
COMMIT_PAUSE = partial(
    Histogram,
    "p2pcast_peer_commit_pause_seconds",
    "How long generation paused for a commit",
    ["engine"],
    PAUSES,
)
LAST_COMMIT_PAUSE = partial(
    gauges, "p2pcast_peer_last_commit_pause_seconds", "Pause of an engine's last commit", ["engine"]
)
RECOMPUTED_TOKENS = partial(
    counters, "p2pcast_peer_recomputed_tokens", "Tokens computed anew because of commits", ["engine"]
)
REFUSED_INSTALLS = partial(
    counters, "p2pcast_peer_refused_installs", "Installs that failed or were refused", ["engine"]
)

# -- pulls and the mirror
SOURCES = partial(gauge, "p2pcast_peer_sources", "Nodes that this peer pulls from")
PULLED_BYTES = partial(counter, "p2pcast_peer_pulled_bytes", "Piece bytes that were pulled")
MIRROR_IN_USE = partial(gauge, "p2pcast_peer_mirror_in_use", "Whether versions come from the mirror")
MIRROR_ARTIFACTS = partial(gauge, "p2pcast_peer_mirror_artifacts", "Artifacts that the mirror shows")
MIRROR_RECEIVED = partial(counter, "p2pcast_peer_mirror_received_bytes", "Bytes received from the mirror")
MIRROR_ERRORS = partial(
    counter, "p2pcast_peer_mirror_errors", "Requests to the mirror that failed, and pieces that did not match"
)
