"""The ledger's routes for learners and auditors: groups, versions, batches, checkpoints and audits.

Guarantees: every answer that reports a change comes after the commit of that change. A repeated request gets the same
answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgpack
from aiohttp import web

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api import trainer_api as trainers
from p2pcast.ledger_api.api_route import JSON, MSGPACK, HexId, Nothing, encoded, hex_of
from p2pcast.process.events import Events
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.overlong import overlong_of
from trainer_node.ledger.batch_transitions import BatchMember, Taken
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger_server.api_server import REQUEST, ApiServer
from trainer_node.ledger_server.learner_times import LearnerTimes
from trainer_node.ledger_server.lease_queue import LeaseQueue
from trainer_node.ledger_server.transition_executors import CallerTransitions

RETRY_S: Final = 0.2
"""Shortest delay that the ledger asks for after a request that found no batch, in seconds."""
TAKE_MOST_S: Final = 2.0
"""Longest delay that the ledger asks for after a request that found no batch, in seconds."""


class LearnerRoutes:
    """``rewarded``: called with the mean reward of each batch."""

    def __init__(
        self,
        ledger: Ledger,
        calls: CallerTransitions,
        queue: LeaseQueue,
        events: Events,
        times: LearnerTimes,
        rewarded: Callable[[float | None], object],
    ) -> None:
        self._ledger, self._calls, self._queue = ledger, calls, queue
        self._events, self._times, self._rewarded = events, times, rewarded

    def routes(self, server: ApiServer) -> list[web.RouteDef]:
        return [
            server.on_records(trainers.GROUPS, "groups", Group, self._add_groups),
            server.on(trainers.READ_GROUPS, self._read_groups),
            server.on(trainers.PUBLISH, self._publish),
            server.on(trainers.TAKE, self._take),
            server.on(trainers.APPLIED, self._applied),
            server.on(trainers.ACK, self._ack),
            server.on(trainers.RESUME, self._resume),
            server.on(trainers.TAKE_AUDIT, self._next_audit),
            server.on(trainers.REPORT_AUDIT, self._audited),
            web.get("/v1/groups/{group}", server.answering(self._group, "trainer")),
        ]

    async def _add_groups(self, asked: trainers.GroupsRequest, groups: list[Group]) -> trainers.GroupsAnswer:
        added = await self._calls.call(self._ledger.add_groups, groups)
        self._queue.changed()
        return trainers.GroupsAnswer(added)

    async def _group(self, request: web.Request) -> web.StreamResponse:
        try:
            group = hex_of(HexId, request.match_info["group"])
        except ValueError as error:
            raise UsageError(f"the group's id: {error}") from None
        found = await self._calls.call(self._ledger.group, group)
        return web.Response(body=encoded(found, JSON), content_type=JSON)

    async def _read_groups(self, asked: trainers.ReadGroupsRequest) -> trainers.ReadGroupsAnswer:
        return trainers.ReadGroupsAnswer(await self._calls.call(self._ledger.groups, asked.groups))

    async def _publish(self, asked: trainers.PublishRequest) -> Nothing:
        version = Version.parse(asked.version)
        await self._calls.call(self._ledger.publish, version, asked.manifest, asked.schedule)
        self._events.emit("version_known", version=str(version))
        self._times.known(version, time.monotonic())
        self._queue.changed()
        return Nothing()

    async def _take(self, asked: trainers.TakeRequest) -> trainers.TakeAnswer | web.StreamResponse:
        step, began_s = asked.step, time.monotonic()
        overlong = "keep" if asked.overlong is None else overlong_of(asked.overlong)
        self._times.asked(step, began_s)
        taken = await self._calls.call(self._ledger.take, asked.epoch, asked.branch, step, overlong)
        self._queue.changed()
        report = trainers.BatchReport(taken.played, taken.reward)
        if taken.batch is None:
            if taken.finished:
                return trainers.TakeAnswer(report, finished=True)
            # The larger the batch, the longer the look at its groups: it may take a tenth of the ledger's time.
            return trainers.TakeAnswer(report, wait=min(TAKE_MOST_S, max(RETRY_S, 10 * (time.monotonic() - began_s))))
        # Before the first byte of the answer: it has no room for an error.
        if damaged := await self._calls.call(self._ledger.reopen_damaged, taken.batch):
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
            await response.write(encoded(await self._calls.call(self._member, member), MSGPACK))
        await response.write_eof()
        return response

    def _member(self, member: BatchMember) -> trainers.BatchGroup:
        rows = [
            trainers.BatchResult(self._ledger.body(one.place), one.reward, one.worker, one.settled_step)
            for one in member.results
        ]
        return trainers.BatchGroup(member.group, rows)

    async def _applied(self, asked: trainers.AppliedRequest) -> Nothing:
        await self._calls.call(self._ledger.applied, asked.epoch, asked.batch, asked.step)
        self._events.emit("batch_applied", batch=asked.batch.hex(), step=asked.step)
        self._times.applied(asked.step - 1, time.monotonic())
        self._queue.changed()
        return Nothing()

    async def _ack(self, asked: trainers.AckRequest) -> Nothing:
        await self._calls.call(self._ledger.ack, asked.epoch, asked.step, asked.batches, asked.checkpoint)
        self._events.emit("checkpoint_acknowledged", step=asked.step, batches=len(asked.batches))
        return Nothing()

    async def _resume(self, asked: trainers.ResumeRequest) -> trainers.ResumeAnswer:
        terms = (asked.branch, asked.step, asked.checkpoint, asked.batches)
        epoch = await self._calls.call(self._ledger.resume, *terms, from_start=bool(asked.from_start))
        self._events.emit("learner_resumed", epoch=epoch, branch=asked.branch, step=asked.step)
        self._times.resumed()
        self._queue.changed()
        return trainers.ResumeAnswer(epoch)

    # -- auditors

    async def _next_audit(self, asked: trainers.TakeAuditRequest) -> trainers.TakeAuditAnswer:
        found = await self._calls.call(self._ledger.next_audit, Version.parse(asked.version))
        return trainers.TakeAuditAnswer(*(found or ()))

    async def _audited(self, asked: trainers.ReportAuditRequest) -> Nothing:
        worker = await self._calls.call(self._ledger.audited, asked.job, asked.lease, agrees=asked.agrees)
        if not asked.agrees:
            gaps = {"mean_gap": asked.mean_gap, "largest_gap": asked.largest_gap}
            self._events.emit("audit_disagrees", worker=worker, job=asked.job.hex(), **gaps)
        return Nothing()
