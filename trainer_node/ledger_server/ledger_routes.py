"""The ledger's HTTP API: translates requests into the ledger's transitions, and errors into statuses.

Promises: every answer that reports a change comes after the commit of that change. A request may be repeated: it gets
the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from typing import Any, Final, ParamSpec, TypeVar

import msgpack
from aiohttp import web
from msgspec.structs import replace

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api import trainer_api as trainers
from p2pcast.ledger_api import worker_api as workers
from p2pcast.ledger_api.api_route import JSON, MAX_LIST, MSGPACK, HexId, Nothing, encoded, hex_of
from p2pcast.process.events import Events
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.overlong import overlong_of
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import Returned, ReturnReason
from p2pcast.tasks.task_process import TaskProcesses
from trainer_node.ledger.batch_transitions import BatchMember, Taken
from trainer_node.ledger.leasing import Grant
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import BEARER
from trainer_node.ledger_server.api_server import CALLER, REQUEST, ApiServer
from trainer_node.ledger_server.callers import Callers
from trainer_node.ledger_server.heartbeat_batch import HeartbeatBatch
from trainer_node.ledger_server.learner_times import LearnerTimes
from trainer_node.ledger_server.lease_queue import LeaseQueue
from trainer_node.ledger_server.probes.probe_desk import ProbeDesk
from trainer_node.ledger_server.probes.probe_routes import ProbeRoutes
from trainer_node.ledger_server.rewards.reward_desk import RewardDesk, Turns
from trainer_node.ledger_server.rewards.reward_replays import checked_rewards, stated_rewards
from trainer_node.ledger_server.run_end import RunEnd
from trainer_node.ledger_server.transition_executors import THREADS, Executors
from trainer_node.ledger_server.worker_control.engine_regions import EngineRegions
from trainer_node.ledger_server.worker_control.worker_drains import WorkerDrains
from trainer_node.scheduling.served_versions import EngineId, KnownEngine, believed

P = ParamSpec("P")
T = TypeVar("T")

RETRY_S: Final = 0.2
"""Delay that the ledger asks for after a request that found no leases, in seconds."""
TAKE_MOST_S: Final = 2.0
"""Longest delay that the ledger asks for after a request that found no batch, in seconds."""
MOST_TRANSITIONS: Final = 8
"""Transitions of one certificate at one time: a worker needs about three."""
_NOTHING: Final = Nothing()


class LedgerRoutes:
    def __init__(
        self,
        ledger: Ledger,
        scorers: TaskProcesses,
        callers: Callers,
        queue: LeaseQueue,
        heartbeats: HeartbeatBatch,
        executors: Executors,
        documents: dict[str, Callable[[], dict[str, Any]]],
        learn: Callable[[Collection[Version]], Awaitable[None]],
        known: Callable[[EngineId], KnownEngine | None],
        end: RunEnd,
        events: Events,
        times: LearnerTimes,
        probes: ProbeDesk,
        regions: EngineRegions,
        drains: WorkerDrains,
        *,
        rewarded: Callable[[float | None], object] = lambda reward: None,
        trusting: bool = False,
    ) -> None:
        """``documents``: of GET /v1/NAME, for trainers. ``learn``: called before versions of results are judged.
        ``known``: the hub's knowledge of an engine. ``rewarded``: called with the
        mean reward of each batch. ``trusting``: workers' rewards count.
        """
        self._ledger, self._scorers, self._queue = ledger, scorers, queue
        score = stated_rewards if trusting else functools.partial(checked_rewards, scorers)
        self._desk = RewardDesk(score, scorers.places)
        self._executors = executors
        self._server = ApiServer(callers)
        self._transitions = Turns(THREADS, MOST_TRANSITIONS)
        self._heartbeats = heartbeats
        self._documents = documents
        self._learn, self._known, self._end = learn, known, end
        self._events, self._times = events, times
        self._regions, self._drains, self._rewarded = regions, drains, rewarded
        self._probes = ProbeRoutes(probes, self._prober, learn, events)

    def routes(self) -> list[web.RouteDef]:
        on, on_records = self._server.on, self._server.on_records
        return [
            on(workers.REGISTER, self._register),
            on(workers.LEASE, self._lease),
            on(workers.HEARTBEAT, self._heartbeat),
            on(workers.RETURN, self._return),
            on_records(workers.RESULTS, "results", Result, self._results),
            on_records(trainers.GROUPS, "groups", Group, self._add_groups),
            on(trainers.READ_GROUPS, self._read_groups),
            on(trainers.PUBLISH, self._publish),
            on(trainers.TAKE, self._take),
            on(trainers.APPLIED, self._applied),
            on(trainers.ACK, self._ack),
            on(trainers.RESUME, self._resume),
            on(trainers.TAKE_AUDIT, self._next_audit),
            on(trainers.REPORT_AUDIT, self._audited),
            on(trainers.DRAIN, self._drain),
            on(trainers.STAY, self._stay),
            *self._probes.routes(self._server),
            web.get("/v1/groups/{group}", self._server.answering(self._group, "trainer")),
            *(self._server.reading(name, document) for name, document in self._documents.items()),
        ]

    # -- transitions

    async def _call(self, transition: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
        """One transition, without blocking the event loop."""
        return await self._run(self._executors.ordinary, functools.partial(transition, *words, **named))

    async def _run(self, executor: Executor, call: Callable[[], T]) -> T:
        async with self._turn():
            return await asyncio.get_running_loop().run_in_executor(executor, call)

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """A place for the request's caller. Holders of a bearer token cannot be told apart and are not counted."""
        name = CALLER.get()
        return contextlib.nullcontext() if name == BEARER else self._transitions.place(name)

    # -- workers

    async def _register(self, asked: workers.Registration) -> workers.Registered:
        made = await self._call(self._ledger.register, CALLER.get(), asked)
        self._queue.changed()
        self._events.emit("worker_registered", name=made.name, worker=made.worker.hex(), slots=asked.slots)
        return replace(made, heartbeat_s=self._ledger.heartbeat_s, check_s=self._scorers.check_s)

    async def _lease(self, asked: workers.LeaseRequest) -> workers.LeaseAnswer:
        served = Version.parse(asked.served)
        staged = None if asked.staged is None else Version.parse(asked.staged)
        engine = None if asked.engine is None else EngineId(asked.engine.node.hex(), asked.engine.name)
        most = min(asked.slots, MAX_LIST)

        def known() -> KnownEngine | None:
            return None if engine is None else self._known(engine)

        async def attempt() -> Grant:
            self._server.check_role(workers.LEASE.role)
            words = (asked.session, most, served, asked.manifest, staged, known())
            return await self._run(self._executors.urgent, functools.partial(self._ledger.grant, *words))

        request = REQUEST.get()

        def gone() -> bool:
            """Also if the engine has another version now: the worker asks again, with that one."""
            if (now := known()) is not None and before is not None and now.served != before.served:
                return True
            return request.transport is None or request.transport.is_closing() or self._end.over()

        before = known()
        kind = served, believed(served, staged, before).served
        leases = await self._queue.ask(attempt, kind, asked.wait_s or 0.0, gone)
        if engine is not None:
            self._regions.note(asked.session, engine)
        rows = [workers.LeaseRow(o.lease, o.job.to_bytes(), o.expires_in_s, o.latest_in_s) for o in leases]
        return workers.LeaseAnswer(rows, not rows and self._end.over(), RETRY_S)

    async def _heartbeat(self, asked: workers.HeartbeatRequest) -> workers.HeartbeatAnswer:
        async with self._turn():
            held = await self._heartbeats.ask(asked.session, {row.lease: row.tokens for row in asked.leases})
        if any(one.state == "abort" for one in held):
            self._queue.changed()
        # A worker that registered among few workers would keep their short interval.
        return workers.HeartbeatAnswer(held, self._ledger.heartbeat_s)

    async def _return(self, asked: workers.ReturnRequest) -> Nothing:
        leases, why = asked.leases, _reasons(asked.reasons or ())
        for first in range(0, max(1, len(leases)), MAX_LIST):
            await self._call(self._ledger.give_back, asked.session, leases[first : first + MAX_LIST], why)
        self._queue.changed()
        return _NOTHING

    async def _results(self, asked: workers.ResultsRequest, results: list[Result]) -> workers.ResultsAnswer:
        await self._learn({span.version for result in results for span in result.spans})
        jobs = await self._call(self._ledger.unscored, asked.session, results)
        # Holders of a bearer token cannot be told apart: each session has turns of its own.
        name = CALLER.get()
        turn = asked.session.hex() if name == BEARER else name
        async with self._desk.rewards(turn, jobs, results) as rewards:
            verdicts = await self._call(self._ledger.settle, asked.session, results, rewards)
        self._queue.changed()
        return workers.ResultsAnswer(verdicts)

    # -- auditors

    async def _prober(self, session: bytes, version: Version, manifest: bytes) -> tuple[bytes, str] | None:
        return await self._call(self._ledger.prober, session, version, manifest)

    async def _next_audit(self, asked: trainers.TakeAuditRequest) -> trainers.TakeAuditAnswer:
        found = await self._call(self._ledger.next_audit, Version.parse(asked.version))
        return trainers.TakeAuditAnswer(*(found or ()))

    async def _audited(self, asked: trainers.ReportAuditRequest) -> Nothing:
        worker = await self._call(self._ledger.audited, asked.job, asked.lease, agrees=asked.agrees)
        if not asked.agrees:
            gaps = {"mean_gap": asked.mean_gap, "largest_gap": asked.largest_gap}
            self._events.emit("audit_disagrees", worker=worker, job=asked.job.hex(), **gaps)
        return _NOTHING

    # -- the fleet's operator

    async def _drain(self, asked: trainers.DrainRequest) -> trainers.DrainAnswer:
        return trainers.DrainAnswer(await self._drains.order(asked.name, asked.for_s))

    async def _stay(self, asked: trainers.StayRequest) -> Nothing:
        self._end.stay(asked.for_s)
        return _NOTHING

    # -- trainers

    async def _add_groups(self, asked: trainers.GroupsRequest, groups: list[Group]) -> trainers.GroupsAnswer:
        added = await self._call(self._ledger.add_groups, groups)
        self._queue.changed()
        return trainers.GroupsAnswer(added)

    async def _group(self, request: web.Request) -> web.StreamResponse:
        try:
            group = hex_of(HexId, request.match_info["group"])
        except ValueError as error:
            raise UsageError(f"the group's id: {error}") from None
        found = await self._call(self._ledger.group, group)
        return web.Response(body=encoded(found, JSON), content_type=JSON)

    async def _read_groups(self, asked: trainers.ReadGroupsRequest) -> trainers.ReadGroupsAnswer:
        return trainers.ReadGroupsAnswer(await self._call(self._ledger.groups, asked.groups))

    async def _publish(self, asked: trainers.PublishRequest) -> Nothing:
        version = Version.parse(asked.version)
        await self._call(self._ledger.publish, version, asked.manifest, asked.schedule)
        self._events.emit("version_known", version=str(version))
        self._times.known(version, time.monotonic())
        self._queue.changed()
        return _NOTHING

    async def _take(self, asked: trainers.TakeRequest) -> trainers.TakeAnswer | web.StreamResponse:
        step, began_s = asked.step, time.monotonic()
        overlong = "keep" if asked.overlong is None else overlong_of(asked.overlong)
        self._times.asked(step, began_s)
        taken = await self._call(self._ledger.take, asked.epoch, asked.branch, step, overlong)
        self._queue.changed()
        report = trainers.BatchReport(taken.played, taken.reward)
        if taken.batch is None:
            if taken.finished:
                return trainers.TakeAnswer(report, finished=True)
            # The larger the batch, the longer the look at its groups: it may take a tenth of the ledger's time.
            return trainers.TakeAnswer(report, wait=min(TAKE_MOST_S, max(RETRY_S, 10 * (time.monotonic() - began_s))))
        # Before the first byte of the answer: it has no room for an error.
        if damaged := await self._call(self._ledger.reopen_damaged, taken.batch):
            self._events.emit("results_damaged", batch=taken.batch.id.hex(), results=damaged)
            self._queue.changed()
            return trainers.TakeAnswer(report, wait=RETRY_S)
        return await self._send_batch(taken)

    async def _send_batch(self, taken: Taken) -> web.StreamResponse:
        """A ``TakeAnswer``, group by group: a batch may be larger than memory should hold at once."""
        batch, packer = taken.batch, msgpack.Packer()
        assert batch is not None
        self._times.taken(batch.step, sum(len(member.results) for member in batch.members), time.monotonic())
        self._rewarded(taken.reward)
        self._events.emit(
            "batch_taken", batch=batch.id.hex(), step=batch.step, groups=len(batch.members),
            groups_played=taken.played, mean_reward=taken.reward,
        )  # fmt: skip
        response = web.StreamResponse(headers={"Content-Type": MSGPACK})
        await response.prepare(REQUEST.get())
        report = {"groups_played": taken.played, "mean_reward": taken.reward}
        head = {"batch": batch.id, "step": batch.step, "report": report}
        await response.write(
            packer.pack_map_header(len(head) + 1)
            + b"".join(packer.pack(name) + packer.pack(value) for name, value in head.items())
            + packer.pack("groups")
            + packer.pack_array_header(len(batch.members))
        )
        for member in batch.members:
            await response.write(encoded(await self._call(self._member, member), MSGPACK))
        await response.write_eof()
        return response

    def _member(self, member: BatchMember) -> trainers.BatchGroup:
        rows = [
            trainers.BatchResult(self._ledger.body(one.place), one.reward, one.worker, one.settled_step)
            for one in member.results
        ]
        return trainers.BatchGroup(member.group, rows)

    async def _applied(self, asked: trainers.AppliedRequest) -> Nothing:
        await self._call(self._ledger.applied, asked.epoch, asked.batch, asked.step)
        self._events.emit("batch_applied", batch=asked.batch.hex(), step=asked.step)
        self._times.applied(asked.step - 1, time.monotonic())
        self._queue.changed()
        return _NOTHING

    async def _ack(self, asked: trainers.AckRequest) -> Nothing:
        await self._call(self._ledger.ack, asked.epoch, asked.step, asked.batches, asked.checkpoint)
        self._events.emit("checkpoint_acknowledged", step=asked.step, batches=len(asked.batches))
        return _NOTHING

    async def _resume(self, asked: trainers.ResumeRequest) -> trainers.ResumeAnswer:
        terms = (asked.branch, asked.step, asked.checkpoint, asked.batches)
        epoch = await self._call(self._ledger.resume, *terms, from_start=bool(asked.from_start))
        self._events.emit("learner_resumed", epoch=epoch, branch=asked.branch, step=asked.step)
        self._times.resumed()
        self._queue.changed()
        return trainers.ResumeAnswer(epoch)


def _reasons(rows: Sequence[workers.LeaseReason]) -> dict[bytes, Returned]:
    """By lease. A reason of a newer worker counts as none."""
    known = {one.value: one for one in ReturnReason}
    return {row.lease: Returned(known[row.reason], row.detail or "") for row in rows if row.reason in known}
