"""The ledger's daemon: parts, connections between the parts, and background work.

Guarantees: the ledger answers no request before it holds its state folder and its database alone. Transitions run in
threads and share commits, so that no request blocks another. After SIGTERM every answered request is in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from p2pcast.daemon.http_access import HttpAccess
from p2pcast.daemon.http_caller import certified_caller
from p2pcast.daemon.http_connections import HttpLimits
from p2pcast.daemon.http_server import HttpServer
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground import limits
from p2pcast.ground.addresses import show_address
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.daemon_process import StateFile
from p2pcast.process.events import Events
from p2pcast.process.log_context import note_daemon
from p2pcast.store.state_format import state_lock
from p2pcast.tasks.child_processes.prompt_reader import PROMPT_S, PromptReader
from p2pcast.tasks.task import FaultyPrompt, Task
from p2pcast.tasks.task_process import TaskProcesses
from p2pcast.telemetry.span_export import export_events
from p2pcast.transport.node_certificate import NodeCertificate
from p2pcast.trust import bearer_tokens
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from trainer_node.admission.trust_files import secret_of
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.job_groups import FOREIGN
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import Policy
from trainer_node.ledger.prompts.prompting import PassedPrompts
from trainer_node.ledger_server.api_server import ApiServer
from trainer_node.ledger_server.callers import WORKER_FILE, Callers, worker_bearer
from trainer_node.ledger_server.learner_routes import LearnerRoutes
from trainer_node.ledger_server.learner_times import LearnerTimes
from trainer_node.ledger_server.lease_queue import LeaseQueue
from trainer_node.ledger_server.ledger_events import EMIT_S, LedgerEvents
from trainer_node.ledger_server.ledger_view import RENEW_S, SILENT_S, LedgerView
from trainer_node.ledger_server.probes.probe_desk import ProbeDesk
from trainer_node.ledger_server.probes.probe_routes import ProbeRoutes
from trainer_node.ledger_server.prompt_choice import HookSource
from trainer_node.ledger_server.prompt_feeder import CHECK_S, Feed, PromptFeeder
from trainer_node.ledger_server.retried_work import RetriedWork
from trainer_node.ledger_server.rewards.reward_replays import REPLAY_S, RewardReplays
from trainer_node.ledger_server.run_end import RunEnd
from trainer_node.ledger_server.summary_sender import SEND_S, SummarySender
from trainer_node.ledger_server.transition_executors import CallerTransitions, Executors
from trainer_node.ledger_server.version_follower import POLL_S, HubKnowledge, VersionFollower
from trainer_node.ledger_server.worker_control.engine_regions import EngineRegions
from trainer_node.ledger_server.worker_control.worker_drains import WorkerDrains
from trainer_node.ledger_server.worker_routes import LeaseRoutes, ResultRoutes

logger = logging.getLogger("p2pcast.ledger")

T = TypeVar("T")

SWITCH_S = 0.0002
"""Longest turn of a thread while another one waits for the interpreter."""
EXPIRE_S = 1.0
"""Interval in seconds at which leases end whose time is over."""
PRUNE_S = 30.0
DISK = "disk"
"""Name of the work that looks for room after a write that failed."""
HTTP_SHARE = 1 / 2
"""Share of the descriptors for HTTP connections: a ledger has no links."""
MOST_CONNECTIONS = 8 * limits.MAX_HTTP_CONNECTIONS
"""Open HTTP connections: each of a thousand workers has up to three."""


@dataclass(frozen=True, slots=True)
class CertificateSource:
    """``hub``: address at which the hub issues certificates. ``token`` None: that of the last enrolment."""

    hub: tuple[str, int]
    token: JoinToken | None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """``hub``: base URL of the hub's HTTP server; None: trainers state versions. ``database``: URL; None: SQLite in the
    state folder. ``feed``: None: trainers add all groups. ``task_name``, ``hooks``: as on the command line.
    ``listen``: address for callers with certificates of the run. ``http_per_address``: open connections of one address;
    None: the default.
    """

    state: Path
    http: tuple[str, int]
    policy: Policy
    task: Task
    task_name: str
    hub: str | None = None
    hub_bearer: str | None = None
    listen: tuple[str, int] | None = None
    http_per_address: int | None = None
    certificate: CertificateSource | None = None
    database: str | None = None
    feed: Feed | None = None
    hooks: str | None = None
    prompt_s: float = PROMPT_S
    check_s: float = 10.0
    checks: int = 1
    check_memory_bytes: int = 2 * limits.GIB


class LedgerNotices:
    """Passes notices of the ledger's threads to the event loop, on which it is made."""

    def __init__(self, events: Events, tasks: Tasks) -> None:
        self.events, self.tasks = events, tasks
        self.queue = LeaseQueue()
        self.ledger_events = LedgerEvents(events, SILENT_S)
        self._loop = asyncio.get_running_loop()

    def happened(self, counts: Mapping[tuple[str, ...], int]) -> None:
        """Called in a thread, after a commit."""
        self._loop.call_soon_threadsafe(self._add, counts)

    def ran_short(self, short: str, error: BaseException) -> None:
        """Called in a thread, after a write failed for a shortage of the machine."""
        self._loop.call_soon_threadsafe(self.tasks.note_shortage, DISK, short, error)

    def _add(self, counts: Mapping[tuple[str, ...], int]) -> None:
        if self.ledger_events.add(counts):
            self.queue.changed()


class LedgerDaemon:
    def __init__(
        self, config: LedgerConfig, ledger: Ledger, notices: LedgerNotices, certificate: NodeCertificate | None
    ) -> None:
        events, tasks = notices.events, notices.tasks
        self._certificate = certificate
        self.secure_address: tuple[str, int] | None = None
        self._config, self._ledger, self._tasks = config, ledger, tasks
        self._memory = StateFile(config.state / "ledger.json", {"run": None})
        self._executors = Executors.start()
        self._scorers = TaskProcesses(
            config.task_name,
            config.task.hash,
            processes=config.checks,
            check_s=config.check_s,
            memory_bytes=config.check_memory_bytes,
        )
        self._queue, self._ledger_events = notices.queue, notices.ledger_events
        self._hub = HubKnowledge()
        self._feeder: PromptFeeder | None = None
        self._prompts: PromptReader | None = None
        self._retried = RetriedWork(events, tasks)
        self._events = events
        self._times = LearnerTimes()
        self._probes = ProbeDesk()
        self._regions = EngineRegions(self._hub.region)
        self._drains = WorkerDrains(partial(self._call, ledger.drain), events, self._queue.changed)
        waiting, delayed = lambda: len(self._queue), lambda: self._retried.why
        self.view = LedgerView(self._look, waiting, self._facts, tasks, delayed, self._probes, self._awaited)
        bearer = bearer_tokens.text(secret_of(config.state / "http.key"))
        for name, text in ((bearer_tokens.FILE, bearer), (WORKER_FILE, worker_bearer(bearer))):
            atomic_write(config.state / name, f"{text}\n".encode(), 0o600)
        callers = Callers(bearer, self._certified)
        calls, end = CallerTransitions(self._executors), RunEnd(self.view.finished)
        self._leases = LeaseRoutes(ledger, calls, self._queue, self._hub, self._regions, self._drains, end)
        trusting = config.policy.trust is not None
        results = ResultRoutes(ledger, calls, self._queue, self._hub, self._scorers, events, trusting=trusting)
        learners = LearnerRoutes(ledger, calls, self._queue, events, self._times, self.view.note_reward)
        probes = ProbeRoutes(self._probes, ledger, calls, self._hub.learn, events)
        server = ApiServer(callers)
        routes = [route for part in (self._leases, results, learners, probes) for route in part.routes(server)]
        routes += [server.reading("status", self.view.status), server.reading("workers", self.view.workers)]
        self.http = HttpServer(
            self.view,
            HttpAccess(bearer, config.state.resolve(), admits=callers.admits),
            events,
            routes=routes,
            limits=HttpLimits(config.http_per_address, HTTP_SHARE, MOST_CONNECTIONS),
        )

    def _note_run(self) -> None:
        """Once the hub has named it."""
        if (run := self._memory["run"]) is not None:
            self._events.run = run
            note_daemon(run=run)

    async def run(self) -> None:
        note_daemon(role="ledger", name=socket.gethostname())
        self._note_run()
        await self.view.renew()
        await self.http.start(*self._config.http)
        if self._certificate is not None and self._config.listen is not None:
            await self._certificate.ready()
            tls = self._certificate.tls.server
            self.secure_address = await self.http.listen(*self._config.listen, "--listen", tls)
        self._announce()
        if self._ledger.foreign_groups:
            self._events.emit("groups_dropped", groups=self._ledger.foreign_groups, reason=FOREIGN)
        async with aiohttp.ClientSession() as http, self._tasks.group() as group:
            group.create_task(self._queue.run, name="waiting leases")
            group.create_task(self._leases.heartbeats.run, name="heartbeats")

            def repeat(name: str, interval_s: float, work: Callable[[], Awaitable[object]]) -> None:
                group.create_task(partial(self._retried.repeat, name, interval_s, work), name=name)

            exported = partial(export_events, "ledger", socket.gethostname(), self._events)
            group.create_task(exported, name="telemetry", ends=True)
            repeat("status", RENEW_S, self.view.renew)
            repeat(DISK, EXPIRE_S, lambda: self._call(self._ledger.check_room))
            repeat("expiry", EXPIRE_S, lambda: self._call(self._ledger.expire))
            repeat("events", EMIT_S, self._ledger_events.emit)
            repeat("checks", EXPIRE_S, self._scorers.recover)
            if self._config.policy.trust is not None:
                replays = RewardReplays(self._ledger, self._scorers, self._call, self._queue.changed, self._events)
                repeat("replays", REPLAY_S, replays.replay)
            repeat("retention", PRUNE_S, lambda: self._call(self._ledger.prune))
            if self._certificate is not None:
                group.create_task(self._certificate.renew_when_due, name="certificate")
            if self._config.hub is not None:
                hub, bearer = self._config.hub, self._config.hub_bearer
                learnt, moved = self._learnt, self._queue.changed
                self._hub.follower = VersionFollower(http, hub, bearer, learnt, moved, self._memory["run"])
                repeat("versions of the hub", POLL_S, self._hub.follower.refresh)
                if bearer is not None:
                    sender = SummarySender(http, hub, bearer, self.view.summary, self._drains.take)
                    # Readiness does not depend on the summary.
                    apart = RetriedWork(self._events, self._tasks)
                    repeated = partial(apart.repeat, "summary for the hub", SEND_S, sender.send)
                    group.create_task(repeated, name="summary for the hub")
            if self._config.feed is not None:
                feed = self._config.feed
                look, add = partial(self._call, self._ledger.prompts, feed.seed), partial(self._add, feed.seed)
                hooks, left_out = self._hooks(feed.seed), self._reject_prompts
                self._prompts = PromptReader(
                    self._config.task_name, self._config.task.hash, feed.seed, limit_s=self._config.prompt_s
                )
                self._feeder = PromptFeeder(self._config.task, feed, self._prompts, look, add, hooks, left_out)
                repeat("prompts", CHECK_S, self._feeder.fill)

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            (self._config.state / "daemon.json").unlink(missing_ok=True)
        await self.http.stop()
        await self._tasks.end()
        await self._scorers.close()
        if self._feeder is not None:
            await self._feeder.close()
        await asyncio.to_thread(self._executors.shutdown)

    # -- background work

    def _certified(self, request: web.Request) -> Certified | None:
        if self._certificate is None:
            return None
        evicted = frozenset() if self._hub.follower is None else self._hub.follower.evicted
        return certified_caller(request, self._certificate.who.run, evicted)

    async def _call(self, transition: Callable[..., T], *words: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executors.ordinary, transition, *words)

    async def _learnt(self, version: Version, manifest: bytes, schedule: bytes | None) -> None:
        assert self._hub.follower is not None
        if self._memory["run"] is None:
            await asyncio.to_thread(self._memory.update, run=self._hub.follower.run_id)
            self._note_run()
        await self._call(self._ledger.publish, version, manifest, schedule)
        self._events.emit("version_known", version=str(version))
        if self._hub.follower.caught_up:
            self._times.known(version, time.monotonic())
        self._queue.changed()

    def _hooks(self, seed: int) -> HookSource | None:
        name = self._config.hooks
        if name is None:
            return None
        state, histories = partial(self._call, self._ledger.hook_state, seed, name), self._ledger.histories
        memory_bytes = self._config.check_memory_bytes
        return HookSource(name=name, state=state, histories=partial(self._call, histories), memory_bytes=memory_bytes)

    async def _add(self, seed: int, passed: PassedPrompts) -> None:
        add = partial(self._ledger.add_prompts, seed, passed)
        await asyncio.get_running_loop().run_in_executor(self._executors.urgent, add)
        self._queue.changed()

    def _reject_prompts(self, faulty: Sequence[FaultyPrompt]) -> None:
        self._ledger_events.add({("prompt_rejected", *one): 1 for one in faulty})

    # -- for /status

    async def _look(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        status, workers = (
            await self._call(self._ledger.status),
            await self._call(self._ledger.workers, self._regions.region),
        )
        self._ledger_events.update_workers(workers)
        self._probes.retain({row["name"] for row in workers})
        present = [row for row in workers if row["silent_s"] < SILENT_S]
        self._ledger.pace_heartbeats(len(present))
        # A drained worker is stopped soon: no broadcast waits for its engine.
        active = [row for row in present if row["drained_s"] == 0]
        served = [Version.parse(row["served"]) for row in active if row["served"] is not None]
        self._times.serve(served, time.monotonic())
        return status, workers

    def _awaited(self) -> tuple[str, float]:
        return ("", 0.0) if self._prompts is None else (self._prompts.waits_for, self._prompts.waits_s)

    def _facts(self) -> dict[str, Any]:
        config, follower = self._config, self._hub.follower
        return {
            "run": self._memory["run"],
            "task": config.task.name,
            "task_hash": config.task.hash.hex(),
            "rule": config.policy.rule,
            "staleness": config.policy.bounds.staleness,
            "batch_groups": config.policy.bounds.batch_groups,
            "times": self._times.document(),
            "certificate_until": None if self._certificate is None else self._certificate.until,
            "hub_reached": None if follower is None else follower.reached,
            "prompts_ended": self._feeder is not None and self._feeder.ended,
            "rejected_prompts": 0 if self._feeder is None else self._feeder.rejected,
            "newest_rejected_prompts": []
            if self._feeder is None
            else [one._asdict() for one in self._feeder.newest_rejected],
            "returned_leases": dict(self._ledger_events.returned),
            "newest_rejected_jobs": list(self._ledger_events.newest_rejected),
            "pid": os.getpid(),
        }

    def _announce(self) -> None:
        address = show_address(*self.http.address)
        atomic_write(self._config.state / "daemon.json", b'{"http": "http://%s"}\n' % address.encode(), 0o600)
        state = self._config.state
        logger.info("ledger of task %s, serving http://%s", self._config.task.name, address)
        if self.secure_address is not None:
            logger.info("workers with certificates of the run: https://%s", show_address(*self.secure_address))
        logger.info(
            "workers on this machine: p2pcast work %s --bearer-file %s --task %s …",
            address,
            state / WORKER_FILE,
            self._config.task_name,
        )


@contextlib.asynccontextmanager
async def opened(config: LedgerConfig) -> AsyncIterator[LedgerDaemon]:
    """Lock the state folder, open the database, and build the daemon; close it at the end. Raises LocalError,
    UsageError.
    """
    events = Events()
    tasks = Tasks(events)
    with state_lock(config.state), tasks.watching():
        notices = LedgerNotices(events, tasks)
        store = LedgerStore(config.state, config.database, ran_short=notices.ran_short)
        try:
            ledger = Ledger(store, config.policy, shared_commits=True, happened=notices.happened)
        except BaseException:
            store.close()
            raise
        try:
            source = config.certificate
            certificate = (
                None
                if source is None
                else NodeCertificate(config.state, "ledger", source.name, source.hub, source.token)
            )
            daemon = LedgerDaemon(config, ledger, notices, certificate)
            try:
                yield daemon
            finally:
                await daemon.close()
        finally:
            ledger.close()


async def run_ledger(config: LedgerConfig) -> None:
    """Until cancelled."""
    # The writer gives the interpreter's lock up in each statement: with the default it would wait 5 ms for each one.
    sys.setswitchinterval(SWITCH_S)
    # A look at all objects of all imports takes longer than a lease may.
    gc.freeze()
    async with opened(config) as daemon:
        await daemon.run()
