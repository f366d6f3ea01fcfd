"""A worker as a daemon: waits for its engine, then runs the loops with everything that they need."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeVar

import aiohttp

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.process.log_context import note_daemon
from p2pcast.rollouts.result import Result
from p2pcast.tasks.child_processes.play_pool import PlayPool
from p2pcast.tasks.task import Task
from p2pcast.tasks.task_process import TaskProcesses
from p2pcast.telemetry import span_export
from p2pcast.telemetry.job_spans import play_span
from p2pcast.transport.node_certificate import NodeCertificate
from rollout_node.worker.completions_sampler import CompletionsSampler
from rollout_node.worker.engine_sampler import EngineSampler
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler, TopTokenShare
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.play_loop import PlayLoop, WorkerConfig
from rollout_node.worker.probe_loop import ProbeLoop
from rollout_node.worker.sglang_sampler import SglangSampler

logger = logging.getLogger("p2pcast.worker")

T = TypeVar("T")
SamplerKind = Literal["generate", "completions", "sglang"]
SAMPLERS: Final[dict[SamplerKind, type[GenerateSampler] | type[CompletionsSampler] | type[SglangSampler]]] = {
    "generate": GenerateSampler,
    "completions": CompletionsSampler,
    "sglang": SglangSampler,
}
"""Samplers by the engine's route or kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddresses:
    """Base URLs. ``bearer``: token for a ledger over http."""

    ledger: str
    engine: str
    peer: str
    bearer: str | None


@dataclass(eq=False, repr=False)
class WorkerDaemon:
    """``checks`` and ``plays`` are closed at the end of ``run``. ``certificate``: for a ledger over https. ``adapter``:
    the LoRA adapter that plays.
    """

    addresses: WorkerAddresses
    config: WorkerConfig
    task: Task
    checks: TaskProcesses
    plays: PlayPool
    certificate: NodeCertificate | None = None
    sampler: SamplerKind = "generate"
    adapter: str | None = None
    _loop: PlayLoop | None = field(init=False, default=None)

    async def run(self) -> None:
        """Work until the run has ended or the worker is drained. Raises P2PCastError, alone or in a group."""
        try:
            if self.certificate is None:
                await self._play()
                return
            await self.certificate.ready()
            async with asyncio.TaskGroup() as group:
                renewals = group.create_task(self.certificate.renew_when_due(), name="certificate")
                await self._play()
                renewals.cancel()
        finally:
            await self.plays.close()
            await self.checks.close()

    async def _play(self) -> None:
        where = self.addresses
        # One connection per request: engines close idle connections, and would lose a request sent just then.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession() as http, aiohttp.ClientSession(connector=connector) as engine_http:
            versions = EngineVersions(http, where.peer, where.engine)
            to_engine = engine_http, where.engine, versions
            top = TopTokenShare(self.config.guard_share, min(self.config.guard_tokens, self.task.vocabulary))
            if self.sampler == "generate":
                sampler: EngineSampler[Any] = GenerateSampler(*to_engine, adapter=self.adapter, top=top)
            else:
                sampler = SAMPLERS[self.sampler](*to_engine, adapter=self.adapter)
            served = await _once_up(versions.refresh)
            label = await _once_up(sampler.check)
            logger.info("the engine serves version %s; its peer says %s", label, served.version)
            tls = None if self.certificate is None else partial(self.certificate.client, "ledger")
            ledger = LedgerClient(http, where.ledger, where.bearer, tls)
            # A learner scores its model without the adapter that plays.
            model_alone = SAMPLERS[self.sampler](*to_engine)
            probes = ProbeLoop(ledger, model_alone, versions, self.task.vocabulary)
            note_daemon(role="worker", name=self.config.name, **({"run": versions.run} if versions.run else {}))
            export = span_export.opened("worker", self.config.name)

            def told(lease: Leased, began_s: float, result: Result | None, error: str | None) -> None:
                if export is not None:
                    job = lease.job.job
                    export.add(play_span(versions.run, job, lease.lease, began_s, time.time(), result, error))

            player = JobPlayer(self.task, self.checks, self.plays)
            self._loop = PlayLoop(self.config, player, ledger, sampler, versions, probes, told)
            await _exporting(export, self._loop.run())

    async def drain(self) -> None:
        if self._loop is not None:
            await self._loop.drain()


async def _exporting(export: span_export.SpanExport | None, work: Coroutine[Any, Any, None]) -> None:
    """Run the work, and send its spans during the work and at its end."""
    if export is None:
        await work
        return
    try:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(export.run(), name="telemetry")
            await work
            sending.cancel()
    finally:
        await export.close()


async def _once_up(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat ``ask`` until the engine and the peer are up. Raises P2PCastError if waiting cannot help."""
    delays = Backoff(0.5, 10.0, uniform)
    while True:
        try:
            return await ask()
        except RetryableError as error:
            logger.warning("waiting for the engine: %s", error)
        await asyncio.sleep(delays.next_s())
