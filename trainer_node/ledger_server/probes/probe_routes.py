"""Routes of probes: the learner's probe set to workers, their scores to the learner, its verdicts to people.

Guarantees: scores count for a version only under the hash of its manifest. Nothing that a worker sends here changes a
job, a result or a lease.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api import trainer_api as trainers
from p2pcast.ledger_api import worker_api as workers
from p2pcast.ledger_api.api_route import Nothing
from p2pcast.process.events import Events
from p2pcast.rollouts.probe_set import ProbeSet, unpacked_scores
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger_server.api_server import ApiServer
from trainer_node.ledger_server.probes.probe_desk import MISSED, ProbeComparison, ProbeDesk, Scored
from trainer_node.ledger_server.transition_executors import CallerTransitions

logger = logging.getLogger("p2pcast.ledger")


class ProbeRoutes:
    """``learn``: called before a version is looked up. ``clock``: seconds from any origin."""

    def __init__(
        self,
        desk: ProbeDesk,
        ledger: Ledger,
        calls: CallerTransitions,
        learn: Callable[[Collection[Version]], Awaitable[None]],
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk, self._ledger, self._calls, self._learn = desk, ledger, calls, learn
        self._events, self._clock = events, clock

    def routes(self, server: ApiServer) -> list[web.RouteDef]:
        return [
            server.on(workers.TAKE_PROBE, self._take),
            server.on(workers.REPORT_PROBE, self._report),
            server.on(trainers.PUT_PROBES, self._set),
            server.on(trainers.READ_PROBES, self._read),
            server.on(trainers.JUDGE_PROBES, self._judged),
        ]

    # -- workers

    async def _take(self, asked: workers.ServingEngine) -> workers.TakeProbeAnswer:
        version = Version.parse(asked.served)
        # Without a learner that probes, no request reads the database.
        probes = self._desk.probe_set is not None
        prober = await self._calls.call(self._ledger.prober, asked.session, version, asked.manifest) if probes else None
        found = None if prober is None else self._take_of(*prober, version)
        return workers.TakeProbeAnswer(*(() if found is None else (found.id, found.sequences)))

    def _take_of(self, worker: bytes, name: str, version: Version) -> ProbeSet | None:
        before = self._desk.misses(worker)
        found = self._desk.take(worker, name, version, self._clock())
        if self._desk.misses(worker) and not before:
            self._events.emit("probe_missing", worker=name, version=str(version))
            logger.warning(
                "%d probes of the engine of worker %s failed, and its weights are not checked: see the worker's log",
                MISSED,
                name,
            )
        return found

    async def _report(self, asked: workers.ReportProbeRequest) -> workers.ReportProbeAnswer:
        version, scores = Version.parse(asked.served), _scores(asked.scores, self._desk.probe_set)
        await self._learn({version})
        prober = await self._calls.call(self._ledger.prober, asked.session, version, asked.manifest)
        if prober is None:
            raise RefusedError(f"version {version} is not known with this manifest")
        worker, name = prober
        missed = self._desk.misses(worker)
        wanted = self._desk.answer(worker, asked.set, Scored(os.urandom(16), name, asked.engine, version, scores))
        if missed and wanted:
            self._events.emit("probe_missing_over", worker=name, version=str(version))
        return workers.ReportProbeAnswer(wanted)

    # -- the learner

    async def _set(self, asked: trainers.PutProbesRequest) -> trainers.ProbeSetId:
        found = ProbeSet.checked(asked.sequences)
        self._desk.put(found)
        return trainers.ProbeSetId(found.id)

    async def _read(self, asked: trainers.ProbeSetId) -> trainers.ReadProbesAnswer:
        found = self._desk.read(asked.set)
        if found is None:
            return trainers.ReadProbesAnswer(known=False)
        rows = [trainers.ProbeScores(o.id, o.worker, o.engine, str(o.version), o.scores) for o in found]
        return trainers.ReadProbesAnswer(known=True, answers=rows)

    async def _judged(self, asked: trainers.JudgeProbesRequest) -> Nothing:
        for row in asked.verdicts:
            if (found := self._desk.judge(row)) is not None:
                self._announce(found)
        return Nothing()

    def _announce(self, found: ProbeComparison) -> None:
        version = str(found.version)
        if found.began:
            self._events.emit(
                "probe_alarm", worker=found.worker, engine=found.engine, version=version, kl=found.kl, floor=found.floor
            )
            logger.warning(
                "the weights of %s (worker %s) are not those of version %s: KL %.3g nats a token on the probe set;"
                " compare with `p2pcast verify --live`",
                found.engine, found.worker, found.version, found.kl,
            )  # fmt: skip
        elif found.ended:
            self._events.emit(
                "probe_alarm_over", worker=found.worker, engine=found.engine, version=version, kl=found.kl,
                floor=found.floor,
            )  # fmt: skip


def _scores(text: str, probe_set: ProbeSet | None) -> bytes:
    """Raises UsageError, RemoteError for scores that are not those of one value for each scored token."""
    if probe_set is not None and len(text) != 2 * probe_set.score_bytes:
        raise UsageError(f"field scores has {len(text)} digits, and the probe set needs {2 * probe_set.score_bytes}")
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        raise UsageError("field scores is not hexadecimal") from None
    unpacked_scores(packed)
    return packed
