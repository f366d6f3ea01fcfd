"""The worker's daemon as a task, beside a ledger in memory and a deterministic engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_sampler import jobs_of

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import LocalError, RefusedError, UntrustedError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.child_processes.play_pool import PlayPool
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task_process import TaskProcesses
from p2pcast.transport.node_certificate import FILE, IDENTITY, NodeCertificate
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import fingerprint, new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified, Role
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls
from rollout_node.worker import worker_daemon
from rollout_node.worker.play_loop import WorkerConfig
from rollout_node.worker.worker_daemon import SamplerKind, WorkerAddresses, WorkerDaemon
from tests.support.fake_engine import FakeEngine
from tests.support.memory_ledger import BEARER, MemoryLedger

END_S = 600.0
TASK = Sums()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_daemon, "Backoff", lambda least, most, uniform: Backoff(1e-3, 1e-3, None))


class Checks(TaskProcesses):
    """Counts how often it is closed."""

    def __init__(self) -> None:
        super().__init__("sums", TASK.hash)
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1
        await super().close()


class Worker:
    def __init__(self, ledger: MemoryLedger, engine: FakeEngine) -> None:
        self.ledger, self.engine, self.checks = ledger, engine, Checks()
        self.plays = PlayPool("sums", TASK.hash)

    def daemon(
        self,
        certificate: NodeCertificate | None = None,
        sampler: SamplerKind = "generate",
        adapter: str | None = None,
    ) -> WorkerDaemon:
        bearer = BEARER if certificate is None else None
        where = WorkerAddresses(ledger=self.ledger.url, engine=self.engine.url, peer=self.engine.url, bearer=bearer)
        config = WorkerConfig(name="w", slots=4)
        return WorkerDaemon(where, config, TASK, self.checks, self.plays, certificate, sampler, adapter)

    async def run(self, **parts: Any) -> None:
        async with asyncio.timeout(END_S):
            await self.daemon(**parts).run()


@pytest.fixture
async def worker(ledger: MemoryLedger, engine: FakeEngine) -> AsyncIterator[Worker]:
    found = Worker(ledger, engine)
    yield found
    await found.checks.close()


@contextlib.asynccontextmanager
async def running(daemon: WorkerDaemon) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(daemon.run())
    try:
        async with asyncio.timeout(END_S):
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def own_jobs(count: int) -> list[Job]:
    return [replace(job, job=(number + 1).to_bytes(16, "big")) for number, job in enumerate(jobs_of(TASK, count))]


def left() -> set[str]:
    """Names of the running tasks that a worker starts."""
    names = {task.get_name() for task in asyncio.all_tasks()}
    return names & {"certificate", "heartbeats", "probes", "leases"}


@pytest.mark.parametrize(("sampler", "kv"), [("generate", "recompute"), ("completions", "drain")])
async def test_a_run_is_played_to_its_end(worker: Worker, sampler: SamplerKind, kv: str) -> None:
    worker.engine.kv = kv
    worker.ledger.finish_when_empty = True
    worker.ledger.add(jobs := own_jobs(6))
    await worker.run(sampler=sampler)
    assert worker.ledger.settled.keys() == {job.job for job in jobs}
    assert worker.checks.closed == 1
    assert left() == set()


async def test_probes_are_of_the_model_alone_where_an_adapter_plays(worker: Worker) -> None:
    """A learner scores its model without the adapter of rollouts."""
    worker.ledger.probe_sequences = [[1, 2, 3]]
    worker.ledger.add(own_jobs(1))
    async with running(worker.daemon(adapter="phi")):
        await worker.ledger.until(lambda: bool(worker.ledger.probed and worker.ledger.settled))
    scored = [body for body in worker.engine.asked if body["sampling_params"]["prompt_logprobs"] is not None]
    assert [body["token_ids"] for body in scored] == [[1, 2, 3]]
    assert [body.get("model") for body in scored] == [None]
    assert {body.get("model") for body in worker.engine.asked if body not in scored} == {"phi"}


async def test_a_worker_waits_for_its_engine_and_warns_meanwhile(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.ledger.finish_when_empty = True
    worker.engine.versions = ["none"]

    def install(looks: int) -> None:
        if looks == 5:
            worker.engine.versions = ["0.1"]

    worker.engine.on_look = install
    await worker.run()
    assert {record.levelname for record in caplog.records if "waiting for the engine" in record.message} == {"WARNING"}
    assert len(worker.ledger.registrations) == 1


async def test_an_unfit_engine_ends_a_worker_without_a_registration(worker: Worker) -> None:
    worker.engine.scale_out = False
    with pytest.raises(LocalError, match="--enable-scale-out"):
        await worker.run()
    assert worker.ledger.registrations == []
    assert worker.checks.closed == 1


async def test_a_refused_worker_ends_with_the_ledgers_reason(worker: Worker) -> None:
    worker.ledger.fails = lambda path: 401 if path == "/v1/workers" else None
    with pytest.raises(RefusedError):
        await worker.run()
    assert worker.checks.closed == 1


async def test_a_drained_worker_hands_in_its_plays_and_ends(worker: Worker) -> None:
    worker.engine.gate.clear()
    worker.ledger.add(own_jobs(20))
    daemon = worker.daemon()
    async with running(daemon) as task:
        await worker.engine.until_running(4)
        draining = asyncio.create_task(daemon.drain())
        await asyncio.sleep(0)
        worker.engine.gate.set()
        await draining
        await task
    assert not worker.ledger.leases
    assert len(worker.ledger.settled) >= 4


async def test_a_worker_without_its_engine_drains_at_once(worker: Worker) -> None:
    worker.engine.versions = ["none"]
    daemon = worker.daemon()
    async with running(daemon) as task:
        await daemon.drain()
        assert not task.done()
    assert worker.ledger.registrations == []


async def test_a_cancelled_worker_leaves_no_task_and_no_process(worker: Worker) -> None:
    worker.engine.gate.clear()
    worker.ledger.add(own_jobs(20))
    async with running(worker.daemon()):
        await worker.engine.until_running(4)
    assert left() == set()
    assert worker.checks.closed == 1


# -- a ledger over https


RUN = b"r" * 16
NODE = b"w" * 16


class Authorized:
    """A worker with a certificate in its state folder; the hub is out of reach."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(RUN, time.time())
        (folder / IDENTITY).write_text(json.dumps({"node": NODE.hex()}))
        self.issue(NODE, "worker").save(folder / FILE)
        token = JoinToken(RUN, bytes(20), fingerprint(self.authority.certificate))
        self.certificate = NodeCertificate(folder, "worker", "w", ("127.0.0.1", 1), token)

    def issue(self, node: bytes, role: Role) -> Credentials:
        key, now = new_key(), time.time()
        issued = self.authority.issue(key.public_key(), Certified(RUN, node, role), now, 900.0)
        return Credentials(key, issued, self.authority.certificate, now)

    def server(self, role: Role) -> ssl.SSLContext:
        return Tls(self.issue(b"l" * 16, role)).server


@pytest.fixture
def authorized(tmp_path: Path) -> Authorized:
    return Authorized(tmp_path)


async def serving(ledger: MemoryLedger, tls: ssl.SSLContext) -> None:
    await ledger.stop()
    ledger.run = RUN
    await ledger.start(tls)


async def test_a_worker_shows_its_certificate_and_ends_its_renewal(worker: Worker, authorized: Authorized) -> None:
    await serving(worker.ledger, authorized.server("ledger"))
    worker.ledger.finish_when_empty = True
    worker.ledger.add(own_jobs(2))
    await worker.run(certificate=authorized.certificate)
    assert {caller.node for caller in worker.ledger.callers} == {NODE}
    assert left() == set()


async def test_a_worker_that_fails_ends_its_renewal(worker: Worker, authorized: Authorized) -> None:
    await serving(worker.ledger, authorized.server("peer"))
    with pytest.raises(ExceptionGroup) as raised:
        await worker.run(certificate=authorized.certificate)
    assert [type(error) for error in raised.value.exceptions] == [UntrustedError]
    assert left() == set()
    assert worker.checks.closed == 1
