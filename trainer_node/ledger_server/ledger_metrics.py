"""Names, texts and labels of the ledger's metrics. docs/reference/metrics.md explains each metric."""

from __future__ import annotations

from functools import partial

from p2pcast.process.metric_kinds import counter, counters, gauge, gauges

WAITING_REQUESTS = partial(gauge, "p2pcast_ledger_waiting_requests", "Requests that wait for leases")
IDLE = partial(gauge, "p2pcast_ledger_idle", "Whether no job has been leased for some seconds")
GROUPS = partial(gauges, "p2pcast_ledger_groups", "Groups of jobs by state", ["state"])
JOBS = partial(gauges, "p2pcast_ledger_jobs", "Jobs by state", ["state"])
LEASES = partial(gauges, "p2pcast_ledger_leases", "Leases by state", ["state"])
BATCHES = partial(gauges, "p2pcast_ledger_batches", "Batches by state", ["state"])
REJECTED = partial(gauges, "p2pcast_ledger_rejected_results", "Rejected results by reason", ["reason"])
REJECTED_PROMPTS = partial(
    counter, "p2pcast_ledger_rejected_prompts", "Prompts of the task of which no group could be made"
)
REJECTED_JOBS = partial(gauges, "p2pcast_ledger_rejected_jobs", "Rejected jobs by reason", ["reason"])
RETURNED = partial(counters, "p2pcast_ledger_returned_leases", "Leases that workers gave back, by reason", ["reason"])
ACCEPTED_TOKENS = partial(
    counters, "p2pcast_ledger_accepted_tokens", "Sampled tokens of accepted results, by worker", ["worker"]
)
STALENESS = partial(
    gauges,
    "p2pcast_ledger_rollouts",
    "Rollouts in flight and in queue, by steps behind",
    ["where", "steps"],
)
AHEAD = partial(gauge, "p2pcast_ledger_groups_ahead", "Groups that were opened and are not in an applied batch")
EPOCH = partial(gauge, "p2pcast_ledger_epoch", "Number of times that a learner has resumed")
REPLAYS = partial(gauges, "p2pcast_ledger_replays", "Replays of trusted rewards, by what they found", ["found"])
AUDITS = partial(gauges, "p2pcast_ledger_audits", "Audits of accepted results, by what they found", ["found"])
PROBE_KL = partial(
    gauges, "p2pcast_ledger_probe_kl", "Newest divergence of engines from the learner, nats a token", ["worker"]
)
PROBE_ALARM = partial(gauge, "p2pcast_ledger_probe_alarm", "Engines whose weights are not those of their version")
PROBE_MISSING = partial(gauge, "p2pcast_ledger_probe_missing", "Engines whose newest eight probes have failed")
