"""How the ledger shows itself: /status, /readyz and metrics, from a copy that is renewed every second.

A copy, because every look at the rows waits for its turn among the transitions. docs/reference/metrics.md explains each
metric.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from p2pcast.process.background_tasks import Tasks
from p2pcast.process.metric_kinds import counter, counters, gauge, gauges
from p2pcast.relay import daemon_metrics
from trainer_node.ledger_server.probes.probe_desk import ProbeDesk
from trainer_node.ledger_server.worker_control.worker_summary import worker_summary

RENEW_S = 1.0
"""Interval in seconds at which the copy is renewed."""

SILENT_S = 60.0
"""A worker without a request for so long counts as silent."""
SUMMARY_TEXT = 200
IDLE_LOOKS = 10
"""Looks in a row that find no lease before the ledger says why."""
AWAITED_S = 10.0
"""Time in seconds after which a prompt that has not come is named."""

Document = dict[str, Any]

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


class LedgerView:
    """``look``: the ledger's status and its workers. ``waiting``: requests that wait for leases."""

    def __init__(
        self,
        look: Callable[[], Awaitable[tuple[Document, list[Document]]]],
        waiting: Callable[[], int],
        facts: Callable[[], Document],
        tasks: Tasks,
        delayed: Callable[[], str],
        probes: ProbeDesk,
        awaited: Callable[[], tuple[str, float]] = lambda: ("", 0.0),
    ) -> None:
        """``facts``: of the daemon, for /status. ``delayed``: background work that fails now. ``awaited``: the prompt
        that the task is asked for, and since how many seconds.
        """
        self._look, self._waiting, self._facts, self._tasks, self._delayed = look, waiting, facts, tasks, delayed
        self._probes, self._awaited = probes, awaited
        self._looks_without_leases = 0
        self._status: Document = {}
        self.reward: float | None = None
        """Mean reward of the groups that ended for the newest batch."""
        self._workers: list[Document] = []

    def note_reward(self, reward: float | None) -> None:
        self.reward = reward

    async def renew(self) -> None:
        self._status, self._workers = await self._look()
        self._looks_without_leases = 0 if self._status.get("leases", {}).get("held") else self._looks_without_leases + 1

    def finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self._status.get("finished"))

    def ready(self) -> tuple[bool, str]:
        if delayed := self._delayed():
            return False, delayed
        if not self._status.get("versions"):
            return False, "no version of the weights is known"
        awaited = self._awaited_text()
        if awaited and self._pool_is_empty():
            return False, f"no prompts: {awaited}"
        idle = self.idle()
        return True, f"nothing is leased: {idle}" if idle else awaited

    def healthy(self) -> tuple[bool, str]:
        return self._tasks.healthy()

    def idle(self) -> str:
        """Why no job is leased; empty while one is, for the first looks without one, and after the run's end."""
        status = self._status
        if self._looks_without_leases < IDLE_LOOKS or status.get("finished"):
            return ""
        if not status.get("versions"):
            return "no version of the weights is known"
        present = [row for row in self._workers if row["silent_s"] <= SILENT_S]
        if self._pool_is_empty():
            return f"no prompts: {self._no_prompts()}"
        if not present:
            return "no worker asks for leases"
        if all(row["drained_s"] for row in present):
            return "all workers are drained"
        if not any(row["served"] for row in present):
            return "no worker's engine serves a known version"
        if jobs := status.get("jobs", {}).get("open"):
            return f"{jobs} open jobs wait for other workers, or for an engine that serves their version"
        waiting = status.get("groups", {}).get("waiting", 0)
        return (
            f"{waiting} groups wait for the learner, at {status.get('learner')}: {status.get('ahead')} are ahead of it"
        )

    def _pool_is_empty(self) -> bool:
        return not self._status.get("jobs", {}).get("open") and not self._status.get("groups", {}).get("waiting")

    def _no_prompts(self) -> str:
        if why := self._awaited_text() or self._delayed():
            return why
        return "the task has no further ones" if self._facts().get("prompts_ended") else "no group has been added"

    def _awaited_text(self) -> str:
        """Names a prompt that has not come for a while."""
        name, waits_s = self._awaited()
        return f"{name} has not come for {waits_s:.0f} s" if waits_s >= AWAITED_S else ""

    def status(self) -> Document:
        return {
            "role": "ledger",
            **self._facts(),
            **self._status,
            "waiting_requests": self._waiting(),
            "delayed": self._delayed(),
            "idle": self.idle(),
            "workers": self._workers,
            "probes": self._probes.document(),
            "failures": self._tasks.status(),
            "short": self._tasks.short(),
        }

    def summary(self) -> Document:
        """For the hub: flat and small. ``silent``: workers without a request for SILENT_S."""
        rates = [row["tokens_per_s"] for row in self._workers if row["tokens_per_s"] is not None]
        counts = {name: self._status.get(name, {}) for name in ("groups", "jobs", "leases", "batches", "rejections")}
        return {
            **{name: self._facts().get(name) for name in ("task", "rule", "staleness", "batch_groups")},
            **{name: self._status.get(name) for name in ("learner", "epoch", "finished", "ahead")},
            **counts,
            **{f"ages_{where}": ages for where, ages in self._status.get("ages", {}).items()},
            "reward": None if self.reward is None else round(self.reward, 4),
            "times": {name: value for name, value in self._facts()["times"].items() if value is not None},
            "workers": len(self._workers),
            "silent_workers": sum(row["silent_s"] > SILENT_S for row in self._workers),
            "tokens_per_s": round(sum(rates), 1),
            "accepted_tokens": sum(row["accepted_tokens"] for row in self._workers),
            **worker_summary(self._workers, SILENT_S),
            "probe_alarm": sum(one.alarm for one in self._probes.newest()),
            "probe_missing": len(self._probes.missing()),
            "waiting_requests": self._waiting(),
            "delayed": self._delayed()[:SUMMARY_TEXT],
            "idle": self.idle()[:SUMMARY_TEXT],
        }

    def workers(self) -> Document:
        return {"workers": self._workers}

    def families(self) -> Iterable[Metric]:
        yield daemon_metrics.run_family(self._facts().get("run"))
        yield from daemon_metrics.task_families(self._tasks)
        status = self._status
        yield WAITING_REQUESTS(self._waiting())
        yield IDLE(float(bool(self.idle())))
        yield AHEAD(status.get("ahead", 0))
        yield EPOCH(status.get("epoch", 0))
        for family, kind in (
            (GROUPS, "groups"),
            (JOBS, "jobs"),
            (LEASES, "leases"),
            (BATCHES, "batches"),
            (REJECTED, "rejections"),
            (REJECTED_JOBS, "rejected_jobs"),
            (REPLAYS, "replays"),
        ):
            yield family([([name], float(count)) for name, count in status.get(kind, {}).items()])
        returned = self._facts().get("returned_leases", {})
        yield RETURNED([([reason], float(count)) for reason, count in returned.items()])
        yield REJECTED_PROMPTS(float(self._facts().get("rejected_prompts", 0)))
        ages = status.get("ages", {})
        yield STALENESS(
            [([where, steps], float(count)) for where, found in ages.items() for steps, count in found.items()]
        )
        tokens: Counter[str] = Counter()
        for row in self._workers:
            tokens[row["name"]] += row["accepted_tokens"]
        yield ACCEPTED_TOKENS([([name], float(count)) for name, count in tokens.items()])
        disagree = float(sum(row["disagreements"] for row in self._workers))
        audits = float(sum(row["audits"] for row in self._workers))
        yield AUDITS([(["agrees"], audits - disagree), (["disagrees"], disagree)])
        yield PROBE_KL([([name], kl) for name, kl in self._probes.most().items()])
        yield PROBE_ALARM(float(sum(one.alarm for one in self._probes.newest())))
        yield PROBE_MISSING(float(len(self._probes.missing())))
