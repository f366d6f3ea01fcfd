"""The ledger's routes for workers: registration, leases, heartbeats, results, and the operator's orders about leases.

Guarantees: every answer that reports a change comes after the commit of that change. A repeated request gets the same
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from aiohttp import web
from msgspec.structs import replace

from p2pcast.ground.version import Version
from p2pcast.ledger_api import trainer_api as trainers
from p2pcast.ledger_api import worker_api as workers
from p2pcast.ledger_api.api_route import MAX_LIST, Nothing
from p2pcast.process.events import Events
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import Returned, ReturnReason
from p2pcast.tasks.task_process import TaskProcesses
from trainer_node.ledger.leasing import Beat, Grant
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import BEARER
from trainer_node.ledger_server.api_server import CALLER, REQUEST, ApiServer
from trainer_node.ledger_server.heartbeat_batch import HeartbeatBatch
from trainer_node.ledger_server.lease_queue import LeaseQueue
from trainer_node.ledger_server.rewards.reward_desk import RewardDesk
from trainer_node.ledger_server.rewards.reward_replays import checked_rewards, stated_rewards
from trainer_node.ledger_server.run_end import RunEnd
from trainer_node.ledger_server.transition_executors import CallerTransitions
from trainer_node.ledger_server.version_follower import HubKnowledge
from trainer_node.ledger_server.worker_control.engine_regions import EngineRegions
from trainer_node.ledger_server.worker_control.worker_drains import WorkerDrains
from trainer_node.scheduling.served_versions import EngineId, KnownEngine, believed

RETRY_S: Final = 0.2
"""Delay that the ledger asks for after a request that found no leases, in seconds."""


class LeaseRoutes:
    """``heartbeats``: its owner runs it."""

    def __init__(
        self,
        ledger: Ledger,
        calls: CallerTransitions,
        queue: LeaseQueue,
        hub: HubKnowledge,
        regions: EngineRegions,
        drains: WorkerDrains,
        end: RunEnd,
    ) -> None:
        self.heartbeats = HeartbeatBatch(self._beat)
        self._ledger, self._calls, self._queue, self._hub = ledger, calls, queue, hub
        self._regions, self._drains, self._end = regions, drains, end

    def routes(self, server: ApiServer) -> list[web.RouteDef]:
        return [
            server.on(workers.LEASE, partial(self._lease, server)),
            server.on(workers.HEARTBEAT, self._heartbeat),
            server.on(workers.RETURN, self._return),
            server.on(trainers.DRAIN, self._drain),
            server.on(trainers.STAY, self._stay),
        ]

    async def _lease(self, server: ApiServer, asked: workers.LeaseRequest) -> workers.LeaseAnswer:
        served = Version.parse(asked.served)
        staged = None if asked.staged is None else Version.parse(asked.staged)
        engine = None if asked.engine is None else EngineId(asked.engine.node.hex(), asked.engine.name)
        most = min(asked.slots, MAX_LIST)

        def known() -> KnownEngine | None:
            return None if engine is None else self._hub.engine(engine)

        async def attempt() -> Grant:
            server.check_role(workers.LEASE.role)
            words = (asked.session, most, served, asked.manifest, staged, known())
            return await self._calls.urgent(self._ledger.grant, *words)

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

    async def _beat(self, beats: Sequence[Beat]) -> list[list[workers.HeldLease] | None]:
        return await self._calls.call(self._ledger.heartbeats, beats)

    async def _heartbeat(self, asked: workers.HeartbeatRequest) -> workers.HeartbeatAnswer:
        async with self._calls.turn():
            held = await self.heartbeats.ask(asked.session, {row.lease: row.tokens for row in asked.leases})
        if any(one.state == "abort" for one in held):
            self._queue.changed()
        # A worker that registered among few workers would keep their short interval.
        return workers.HeartbeatAnswer(held, self._ledger.heartbeat_s)

    async def _return(self, asked: workers.ReturnRequest) -> Nothing:
        leases, why = asked.leases, _reasons(asked.reasons or ())
        for first in range(0, max(1, len(leases)), MAX_LIST):
            await self._calls.call(self._ledger.give_back, asked.session, leases[first : first + MAX_LIST], why)
        self._queue.changed()
        return Nothing()

    # -- the fleet's operator

    async def _drain(self, asked: trainers.DrainRequest) -> trainers.DrainAnswer:
        return trainers.DrainAnswer(await self._drains.order(asked.name, asked.for_s))

    async def _stay(self, asked: trainers.StayRequest) -> Nothing:
        self._end.stay(asked.for_s)
        return Nothing()


class ResultRoutes:
    """``trusting``: workers' rewards count."""

    def __init__(
        self,
        ledger: Ledger,
        calls: CallerTransitions,
        queue: LeaseQueue,
        hub: HubKnowledge,
        scorers: TaskProcesses,
        events: Events,
        *,
        trusting: bool,
    ) -> None:
        self._ledger, self._calls, self._queue, self._hub = ledger, calls, queue, hub
        self._scorers, self._events = scorers, events
        self._desk = RewardDesk(stated_rewards if trusting else partial(checked_rewards, scorers), scorers.places)

    def routes(self, server: ApiServer) -> list[web.RouteDef]:
        return [
            server.on(workers.REGISTER, self._register),
            server.on_records(workers.RESULTS, "results", Result, self._results),
        ]

    async def _register(self, asked: workers.Registration) -> workers.Registered:
        made = await self._calls.call(self._ledger.register, CALLER.get(), asked)
        self._queue.changed()
        self._events.emit("worker_registered", name=made.name, worker=made.worker.hex(), slots=asked.slots)
        return replace(made, heartbeat_s=self._ledger.heartbeat_s, check_s=self._scorers.check_s)

    async def _results(self, asked: workers.ResultsRequest, results: list[Result]) -> workers.ResultsAnswer:
        await self._hub.learn({span.version for result in results for span in result.spans})
        jobs = await self._calls.call(self._ledger.unscored, asked.session, results)
        # Holders of a bearer token cannot be told apart: each session has turns of its own.
        name = CALLER.get()
        turn = asked.session.hex() if name == BEARER else name
        async with self._desk.rewards(turn, jobs, results) as rewards:
            verdicts = await self._calls.call(self._ledger.settle, asked.session, results, rewards)
        self._queue.changed()
        return workers.ResultsAnswer(verdicts)


def _reasons(rows: Sequence[workers.LeaseReason]) -> dict[bytes, Returned]:
    """By lease. A reason of a newer worker counts as none."""
    known = {one.value: one for one in ReturnReason}
    return {row.lease: Returned(known[row.reason], row.detail or "") for row in rows if row.reason in known}
