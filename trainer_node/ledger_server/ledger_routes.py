"""The ledger's HTTP API: translates requests into the ledger's transitions, and errors into statuses.

Promises: nothing is received before the caller's role is known. A body is bounded before it is read. Every answer that
reports a change comes after the commit of that change. A request may be repeated: it gets the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, TypeVar

import msgpack
from aiohttp import web

from p2pcast.daemon.http_connections import hold
from p2pcast.daemon.request_body import BodyTooLargeError, read_body, read_json
from p2pcast.ground import limits
from p2pcast.ground.errors import (
    IntegrityError,
    LocalError,
    P2PCastError,
    RefusedError,
    RemoteError,
    RetryableError,
    UsageError,
)
from p2pcast.ground.limits import MAX_SLOTS
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from p2pcast.process.shortages import shortage
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.overlong import MAX_TREATMENT, overlong_of
from p2pcast.rollouts.record_form import RolloutRecord
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import MAX_DETAIL, MAX_REASON, Returned, ReturnReason
from p2pcast.tasks.task_process import TaskProcesses
from trainer_node.ledger.batch_transitions import Member, Taken
from trainer_node.ledger.drained_workers import MAX_FOR_S
from trainer_node.ledger.leasing import Grant
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_report import MAX_READ
from trainer_node.ledger.ledger_rows import BEARER, MAX_LIST, FullError, UnknownIdError
from trainer_node.ledger.workers.registration import Registration
from trainer_node.ledger_server.body_budget import BODY_BYTES, BodyBudget
from trainer_node.ledger_server.callers import CallerConnections, Callers, ForbiddenError, ManyConnectionsError, Role
from trainer_node.ledger_server.heartbeat_batch import HeartbeatBatch
from trainer_node.ledger_server.learner_times import LearnerTimes
from trainer_node.ledger_server.lease_queue import LeaseQueue
from trainer_node.ledger_server.probes.probe_desk import ProbeDesk
from trainer_node.ledger_server.probes.probe_routes import ProbeRoutes
from trainer_node.ledger_server.request_form import HASH_BYTES, ID_BYTES, Form, packed_form
from trainer_node.ledger_server.rewards.reward_desk import RewardDesk, Turns
from trainer_node.ledger_server.rewards.reward_replays import checked_rewards, stated_rewards
from trainer_node.ledger_server.run_end import RunEnd
from trainer_node.ledger_server.transition_executors import THREADS, Executors
from trainer_node.ledger_server.worker_control.engine_regions import EngineRegions
from trainer_node.ledger_server.worker_control.worker_drains import WorkerDrains
from trainer_node.scheduling.served_versions import EngineId, KnownEngine, believed

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=RolloutRecord)

JSON_BYTES: Final = 512 * limits.KIB
"""Largest JSON body: room for the leases of MAX_SLOTS plays in one heartbeat."""
BODY_S: Final = 120.0
"""Time limit for a body, in seconds: 64 MiB at 5 Mbit/s."""
MAX_BATCHES: Final = 4096
"""Batches that one checkpoint may contain since the last."""
MAX_WAIT_S: Final = 30.0
RETRY_S: Final = 0.2
"""Delay that the ledger asks for after a request that found no leases, in seconds."""
TAKE_MOST_S: Final = 2.0
"""Longest delay that the ledger asks for after a request that found no batch, in seconds."""
MSGPACK: Final = "application/x-msgpack"
STATUSES: Final[dict[type[P2PCastError], int]] = {
    UsageError: 400,
    BodyTooLargeError: 413,
    ForbiddenError: 403,
    UnknownIdError: 404,
    RefusedError: 409,
    FullError: 429,
    RemoteError: 400,
    IntegrityError: 500,
    LocalError: 503,
    RetryableError: 503,
}

MOST_TRANSITIONS: Final = 8
"""Transitions of one certificate at one time: a worker needs about three."""
_CALLER: Final = ContextVar("caller", default=BEARER)
"""Name of the caller of the request that this context answers."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
        self._ledger, self._scorers, self._callers, self._queue = ledger, scorers, callers, queue
        score = stated_rewards if trusting else functools.partial(checked_rewards, scorers)
        self._desk = RewardDesk(score, scorers.places)
        self._executors = executors
        self._bodies, self._unpacked = BodyBudget(), BodyBudget()
        self._connections = CallerConnections()
        self._transitions = Turns(THREADS, MOST_TRANSITIONS)
        self._heartbeats = heartbeats
        self._documents = documents
        self._learn, self._known, self._end = learn, known, end
        self._events, self._times = events, times
        self._regions, self._drains, self._rewarded = regions, drains, rewarded
        self._probes = ProbeRoutes(probes, self._form, self._prober, learn, events)

    def routes(self) -> list[web.RouteDef]:
        worker: dict[str, Handler] = {
            "workers": self._register,
            "lease": self._lease,
            "heartbeat": self._heartbeat,
            "return": self._return,
            "results": self._results,
            **self._probes.of_workers,
        }
        trainer: dict[str, Handler] = {
            "groups": self._add_groups,
            "groups/read": self._read_groups,
            "versions": self._publish,
            "batches/take": self._take,
            "batches/applied": self._applied,
            "batches/ack": self._ack,
            "learner/resume": self._resume,
            "audits/take": self._next_audit,
            "audits/report": self._audited,
            "workers/drain": self._drain,
            "workers/stay": self._stay,
            **self._probes.of_trainers,
        }
        return [
            *(web.post(f"/v1/{name}", self._answering(handler, "worker")) for name, handler in worker.items()),
            *(web.post(f"/v1/{name}", self._answering(handler, "trainer")) for name, handler in trainer.items()),
            web.get("/v1/groups/{group}", self._answering(self._group, "trainer")),
            *(web.get(f"/v1/{name}", self._reader(document)) for name, document in self._documents.items()),
        ]

    # -- every request

    def _answering(self, handler: Handler, role: Role) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                caller = self._callers.of_role(request, role)
                self._connections.check(caller, request)
                hold(request, proven=True)
                _CALLER.set(caller.name)
                return await handler(request)
            except Exception as found:  # noqa: BLE001 - bugs are raised again
                error = _said(found)
                status = next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), 500)
                response = web.json_response({"error": str(error)}, status=status)
                if isinstance(error, ManyConnectionsError):
                    response.force_close()
                return response

        return answer

    def _reader(self, document: Callable[[], dict[str, Any]]) -> Handler:
        async def read(request: web.Request) -> web.StreamResponse:
            return web.json_response(document())

        return self._answering(read, "trainer")

    async def _call(self, transition: Callable[P, T], *words: P.args, **named: P.kwargs) -> T:
        """One transition, without blocking the event loop."""
        return await self._run(self._executors.ordinary, functools.partial(transition, *words, **named))

    async def _run(self, executor: Executor, call: Callable[[], T]) -> T:
        async with self._turn():
            return await asyncio.get_running_loop().run_in_executor(executor, call)

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """A place for the request's caller. Holders of a bearer token cannot be told apart and are not counted."""
        name = _CALLER.get()
        return contextlib.nullcontext() if name == BEARER else self._transitions.place(name)

    async def _form(self, request: web.Request) -> Form:
        """The body of a JSON request. Raises UsageError."""
        return Form(await read_json(request, JSON_BYTES, BODY_S))

    async def _packed(self, request: web.Request) -> Form:
        """Called with room for the body. Raises UsageError."""
        return packed_form(await read_body(request, BODY_BYTES, BODY_S), 2 * MAX_LIST)

    @contextlib.asynccontextmanager
    async def _records(
        self, request: web.Request, role: Role, name: str, kind: type[R]
    ) -> AsyncIterator[tuple[Form, list[R]]]:
        """The body of a msgpack request, and the records in its field. Body and unpacked records wait for room."""
        size, caller = request.content_length, self._callers.of_role(request, role).name
        if size is None:
            raise UsageError("the request has no Content-Length")
        async with self._bodies.room(caller, size):
            form = await self._packed(request)
            rows = form.binaries(name, MAX_LIST)
            async with self._unpacked.room(caller, sum(_each(kind.unpacked_bytes, rows, name))):
                yield form, _each(kind.from_bytes, rows, name)

    # -- workers

    async def _register(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        classes = form.form("classes") if form.has("classes") else Form({})
        stated = Registration(
            name=form.text("name", 128, 1),
            slots=form.integer("slots", 1, MAX_SLOTS),
            task=form.text("task", 128, 1),
            task_hash=form.hexadecimal("task_hash", HASH_BYTES),
            price_usd_h=form.number("price_usd_h", 0.0, 1e6) if form.has("price_usd_h") else 0.0,
            device_class=classes.text("gpu", 128) if classes.has("gpu") else "",
        )
        caller = self._callers.of_role(request, "worker")
        playing = form.hexadecimals("leases", ID_BYTES, 2 * MAX_SLOTS) if form.has("leases") else None
        lost = form.hexadecimal("lost", ID_BYTES) if form.has("lost") else None
        made = await self._call(self._ledger.register, caller.name, stated, playing, lost)
        self._queue.changed()
        self._events.emit("worker_registered", name=made.name, worker=made.worker.hex(), slots=stated.slots)
        return web.json_response(
            {
                "worker": made.worker.hex(),
                "session": made.session.hex(),
                "name": made.name,
                "heartbeat_s": self._ledger.heartbeat_s,
                "check_s": self._scorers.check_s,
            }
        )

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        session, slots = form.hexadecimal("session", ID_BYTES), form.integer("slots", 1, MAX_SLOTS)
        served, manifest = form.version("served"), form.hexadecimal("manifest", HASH_BYTES)
        wait_s = form.number("wait_s", 0.0, MAX_WAIT_S) if form.has("wait_s") else 0.0

        staged = form.version("staged") if form.has("staged") else None
        engine = _engine(form.form("engine")) if form.has("engine") else None
        most = min(slots, MAX_LIST)

        def known() -> KnownEngine | None:
            return None if engine is None else self._known(engine)

        async def attempt() -> Grant:
            words = (session, most, served, manifest, staged, known())
            return await self._run(self._executors.urgent, functools.partial(self._ledger.grant, *words))

        def gone() -> bool:
            """Also if the engine has another version now: the worker asks again, with that one."""
            if (now := known()) is not None and before is not None and now.served != before.served:
                return True
            return request.transport is None or request.transport.is_closing() or self._end.over()

        before = known()
        kind = served, believed(served, staged, before).served
        leases = await self._queue.ask(attempt, kind, wait_s, gone)
        if engine is not None:
            self._regions.note(session, engine)
        rows = [
            {
                "lease": one.lease,
                "job": one.job.to_bytes(),
                "expires_in_s": one.expires_in_s,
                "latest_in_s": one.latest_in_s,
            }
            for one in leases
        ]
        return _packed_answer({"leases": rows, "finished": not rows and self._end.over(), "retry_s": RETRY_S})

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        session = form.hexadecimal("session", ID_BYTES)
        tokens = {
            row.hexadecimal("lease", ID_BYTES): row.integer("tokens", 0, 1 << 40)
            for row in form.forms("leases", MAX_SLOTS)
        }
        async with self._turn():
            held = await self._heartbeats.ask(session, tokens)
        rows = [{"lease": h.lease.hex(), "state": h.state, "expires_in_s": h.expires_in_s} for h in held]
        if any(row["state"] == "abort" for row in rows):
            self._queue.changed()
        # A worker that registered among few workers would keep their short interval.
        return web.json_response({"leases": rows, "heartbeat_s": self._ledger.heartbeat_s})

    async def _return(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        session, leases = form.hexadecimal("session", ID_BYTES), form.hexadecimals("leases", ID_BYTES, MAX_SLOTS)
        why = _reasons(form.forms("reasons", MAX_SLOTS)) if form.has("reasons") else {}
        for first in range(0, max(1, len(leases)), MAX_LIST):
            await self._call(self._ledger.give_back, session, leases[first : first + MAX_LIST], why)
        self._queue.changed()
        return web.json_response({})

    async def _results(self, request: web.Request) -> web.StreamResponse:
        async with self._records(request, "worker", "results", Result) as (form, results):
            session = form.binary("session", ID_BYTES)
            await self._learn({span.version for result in results for span in result.spans})
            jobs = await self._call(self._ledger.unscored, session, results)
            # Holders of a bearer token cannot be told apart: each session has turns of its own.
            name = self._callers.of_role(request, "worker").name
            turn = session.hex() if name == BEARER else name
            async with self._desk.rewards(turn, jobs, results) as rewards:
                verdicts = await self._call(self._ledger.settle, session, results, rewards)
        self._queue.changed()
        rows = [v._asdict() | {"job": v.job.hex(), "lease": v.lease.hex()} for v in verdicts]
        return web.json_response({"results": rows})

    # -- auditors

    async def _prober(self, session: bytes, version: Version, manifest: bytes) -> tuple[bytes, str] | None:
        return await self._call(self._ledger.prober, session, version, manifest)

    async def _next_audit(self, request: web.Request) -> web.StreamResponse:
        version = (await self._form(request)).version("version")
        found = await self._call(self._ledger.next_audit, version)
        return _packed_answer({} if found is None else {"worker": found[0], "result": found[1]})

    async def _audited(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        job, lease, agrees = form.hexadecimal("job", ID_BYTES), form.hexadecimal("lease", ID_BYTES), form.flag("agrees")
        gaps = {name: form.number(name, 0.0, 1e9) for name in ("mean_gap", "largest_gap")}
        worker = await self._call(self._ledger.audited, job, lease, agrees=agrees)
        if not agrees:
            self._events.emit("audit_disagrees", worker=worker, job=job.hex(), **gaps)
        return web.json_response({})

    # -- the fleet's operator

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        name, for_s = form.text("name", 128, 1), form.number("for_s", 0.0, MAX_FOR_S)
        return web.json_response({"leases": await self._drains.order(name, for_s)})

    # -- trainers

    async def _add_groups(self, request: web.Request) -> web.StreamResponse:
        async with self._records(request, "trainer", "groups", Group) as (_, groups):
            added = await self._call(self._ledger.add_groups, groups)
        self._queue.changed()
        return web.json_response({"added": added})

    async def _group(self, request: web.Request) -> web.StreamResponse:
        group = Form({"group": request.match_info["group"]}).hexadecimal("group", ID_BYTES)
        return web.json_response(await self._call(self._ledger.group, group))

    async def _read_groups(self, request: web.Request) -> web.StreamResponse:
        ids = (await self._form(request)).hexadecimals("groups", ID_BYTES, MAX_READ)
        return web.json_response({"groups": await self._call(self._ledger.groups, ids)})

    async def _publish(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        version, manifest = form.version("version"), form.hexadecimal("manifest", HASH_BYTES)
        schedule = form.hexadecimal("schedule", HASH_BYTES) if form.has("schedule") else None
        await self._call(self._ledger.publish, version, manifest, schedule)
        self._events.emit("version_known", version=str(version))
        self._times.known(version, time.monotonic())
        self._queue.changed()
        return web.json_response({})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        epoch, branch = form.integer("epoch", 0, 1 << 62), form.integer("branch", 0, 1 << 31)
        step, began_s = form.integer("step", 0, 1 << 62), time.monotonic()
        overlong = overlong_of(form.text("overlong", MAX_TREATMENT)) if form.has("overlong") else "keep"
        self._times.asked(step, began_s)
        taken = await self._call(self._ledger.take, epoch, branch, step, overlong)
        self._queue.changed()
        report = {"groups_played": taken.played, "mean_reward": taken.reward}
        if taken.batch is None:
            # The larger the batch, the longer the look at its groups: it may take a tenth of the ledger's time.
            wait_s = min(TAKE_MOST_S, max(RETRY_S, 10 * (time.monotonic() - began_s)))
            waits = {"finished": True} if taken.finished else {"wait": wait_s}
            return _packed_answer(waits | {"report": report})
        # Before the first byte of the answer: it has no room for an error.
        if damaged := await self._call(self._ledger.reopen_damaged, taken.batch):
            self._events.emit("results_damaged", batch=taken.batch.id.hex(), results=damaged)
            self._queue.changed()
            return _packed_answer({"wait": RETRY_S, "report": report})
        return await self._send_batch(request, taken, report)

    async def _send_batch(self, request: web.Request, taken: Taken, report: dict[str, Any]) -> web.StreamResponse:
        """Group by group: a batch may be larger than memory should hold at once."""
        batch, packer = taken.batch, msgpack.Packer()
        assert batch is not None
        self._times.taken(batch.step, sum(len(member.results) for member in batch.members), time.monotonic())
        self._rewarded(taken.reward)
        self._events.emit(
            "batch_taken", batch=batch.id.hex(), step=batch.step, groups=len(batch.members),
            groups_played=taken.played, mean_reward=taken.reward,
        )  # fmt: skip
        response = web.StreamResponse(headers={"Content-Type": MSGPACK})
        await response.prepare(request)
        head = {"batch": batch.id, "step": batch.step, "report": report}
        await response.write(
            packer.pack_map_header(len(head) + 1)
            + b"".join(packer.pack(name) + packer.pack(value) for name, value in head.items())
            + packer.pack("groups")
            + packer.pack_array_header(len(batch.members))
        )
        for member in batch.members:
            await response.write(packer.pack(await self._call(self._member, member)))
        await response.write_eof()
        return response

    def _member(self, member: Member) -> dict[str, Any]:
        rows = [
            {
                "result": self._ledger.body(result.place),
                "reward": result.reward,
                "worker": result.worker,
                "settled_step": result.settled_step,
            }
            for result in member.results
        ]
        return {"group": member.group, "results": rows}

    async def _applied(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        batch = form.hexadecimal("batch", ID_BYTES)
        step = form.integer("step", 0, 1 << 62)
        await self._call(self._ledger.applied, form.integer("epoch", 0, 1 << 62), batch, step)
        self._events.emit("batch_applied", batch=batch.hex(), step=step)
        self._times.applied(step - 1, time.monotonic())
        self._queue.changed()
        return web.json_response({})

    async def _ack(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        epoch, step = form.integer("epoch", 0, 1 << 62), form.integer("step", 0, 1 << 62)
        batches = form.hexadecimals("batches", ID_BYTES, MAX_BATCHES)
        checkpoint = form.hexadecimal("checkpoint", HASH_BYTES)
        await self._call(self._ledger.ack, epoch, step, batches, checkpoint)
        self._events.emit("checkpoint_acknowledged", step=step, batches=len(batches))
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        form = await self._form(request)
        checkpoint = form.hexadecimal("checkpoint", HASH_BYTES) if form.has("checkpoint") else None
        branch, step = form.integer("branch", 0, 1 << 31), form.integer("step", 0, 1 << 62)
        batches = form.hexadecimals("batches", ID_BYTES, MAX_BATCHES)
        from_start = form.has("from_start") and form.flag("from_start")
        epoch = await self._call(self._ledger.resume, branch, step, checkpoint, batches, from_start=from_start)
        self._events.emit("learner_resumed", epoch=epoch, branch=branch, step=step)
        self._times.resumed()
        self._queue.changed()
        return web.json_response({"epoch": epoch})

    async def _stay(self, request: web.Request) -> web.StreamResponse:
        self._end.stay((await self._form(request)).number("for_s", 0.0, MAX_FOR_S))
        return web.json_response({})


def _reasons(rows: Sequence[Form]) -> dict[bytes, Returned]:
    """By lease. A reason of a newer worker counts as none."""
    known = {one.value: one for one in ReturnReason}
    found = {}
    for row in rows:
        lease, stated = row.hexadecimal("lease", ID_BYTES), known.get(row.text("reason", MAX_REASON))
        detail = row.text("detail", MAX_DETAIL) if row.has("detail") else ""
        if stated is not None:
            found[lease] = Returned(stated, detail)
    return found


def _each(read: Callable[[bytes], T], rows: Sequence[bytes], name: str) -> list[T]:
    """Raises RemoteError with the place of the row that is wrong."""
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(read(row))
        except RemoteError as error:
            raise RemoteError(f"{name}[{number}]: {error}") from None
    return found


def _engine(form: Form) -> EngineId:
    return EngineId(form.hexadecimal("node", ID_BYTES).hex(), form.text("name", limits.MAX_ENGINE_NAME, 1))


def _said(error: Exception) -> P2PCastError:
    """The error that the caller of a request gets. Raises a bug."""
    if isinstance(error, P2PCastError):
        return error
    if (short := shortage(error)) is None:
        raise error
    return LocalError(f"the ledger's machine: {short}")


def _packed_answer(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgpack.packb(document), content_type=MSGPACK)
