"""The worker's loops against a ledger in memory and a deterministic engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from scripted_sampler import jobs_of

from p2pcast.ground.errors import RefusedError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import fault
from p2pcast.rollouts.return_reason import MAX_DETAIL
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Sampler, Task, Trajectory
from p2pcast.tasks.task_process import CheckFailedError
from rollout_node.worker import play_loop
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.play_loop import PlayLoop, WorkerConfig
from rollout_node.worker.returned_plays import MAX_ENGINE_FAULTS
from tests.support import fake_engine, memory_ledger
from tests.support.fake_engine import NODE, FakeEngine
from tests.support.memory_ledger import BEARER, MemoryLedger

END_S = 600.0
TASK = Sums()


def own_jobs(task: Task, count: int) -> list[Job]:
    """With an id for each job."""
    return [replace(job, job=(number + 1).to_bytes(16, "big")) for number, job in enumerate(jobs_of(task, count))]


@asynccontextmanager
async def worker(
    ledger: MemoryLedger, engine: FakeEngine, task: Task = TASK, bearer: str = BEARER, **config: object
) -> AsyncIterator[tuple[PlayLoop, asyncio.Task[None]]]:
    async with aiohttp.ClientSession() as http, asyncio.timeout(END_S):
        versions = EngineVersions(http, engine.url, engine.url)
        settings = replace(WorkerConfig(name="w", slots=4), **config)  # type: ignore[arg-type]
        client = LedgerClient(http, ledger.url, bearer, uniform=lambda low, high: low / 10)
        loop = PlayLoop(settings, JobPlayer(task), client, GenerateSampler(http, engine.url, versions), versions)
        running = asyncio.create_task(loop.run())
        try:
            yield loop, running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_every_job_is_played_once_and_the_worker_ends_with_the_run(
    ledger: MemoryLedger, engine: FakeEngine
) -> None:
    jobs = own_jobs(TASK, 50)
    ledger.add(jobs)
    ledger.finish_when_empty = True
    async with worker(ledger, engine) as (loop, running):
        await running
        assert loop.verdicts == {"accepted": 50}
    assert set(ledger.settled) == {job.job for job in jobs}
    for job in jobs:
        result = ledger.settled[job.job]
        assert fault(result, TASK.vocabulary) is None
        assert result.reward == TASK.reward(job, result.token_ids, result.mask)
    assert ledger.bodies == 50
    assert not ledger.leases
    assert ledger.registrations[0]["task_hash"] == TASK.hash.hex()


async def test_results_name_the_schedules_of_sparse_attention(ledger: MemoryLedger, engine: FakeEngine) -> None:
    """Of the versions that have one, where the engine follows them."""
    engine.versions, engine.tokens_a_version = ["0.1", "0.2"], 40
    engine.schedules = {"0.2": "ab" * 32}
    ledger.add(own_jobs(TASK, 30))
    ledger.finish_when_empty = True
    async with worker(ledger, engine) as (_, running):
        await running
    found = {}
    for result in ledger.settled.values():
        for version in {span.version for span in result.spans}:
            found.setdefault(str(version), set()).add(dict(result.schedules or ()).get(version))
    assert found == {"0.1": {None}, "0.2": {bytes.fromhex("ab" * 32)}}


async def test_no_more_plays_than_slots_run(ledger: MemoryLedger, engine: FakeEngine) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(TASK, 20))
    async with worker(ledger, engine):
        await engine.until_running(4)
        await ledger.until(lambda: len(ledger.heartbeats) > 3)
        assert (engine.running, len(ledger.leases)) == (4, 4)


async def test_heartbeats_carry_the_tokens_so_far(ledger: MemoryLedger, engine: FakeEngine) -> None:
    ledger.add(replace(job, max_tokens=3000) for job in own_jobs(without_stops(TASK), 1))
    async with worker(ledger, engine, without_stops(TASK)):
        await ledger.until(lambda: any(len(set(counts) - {0}) > 1 for counts in ledger.tokens.values()))
        (counts,) = ledger.tokens.values()
        assert counts == sorted(counts)
        assert ledger.engines[-1] == {"node": NODE, "name": f"vllm:{engine.url}"}


def without_stops(task: Sums) -> Sums:
    """The same task, whose plays do not stop before their limit."""
    found = Sums(task.digits)
    found.stop_token_ids = ()  # type: ignore[assignment]
    return found


async def test_an_abort_ends_the_play_at_the_engine_and_frees_its_slot(
    ledger: MemoryLedger, engine: FakeEngine
) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(TASK, 5))
    async with worker(ledger, engine) as (loop, _):
        await engine.until_running(4)
        ledger.aborting = {next(iter(ledger.leases))}
        await engine.until_cut(1)
        await ledger.until(lambda: not ledger.pool)  # the fifth job was leased
        engine.gate.set()
        await ledger.until(lambda: len(ledger.settled) == 4)
        assert loop.verdicts["aborted"] == 1
    assert not ledger.returned


async def test_a_ledger_that_takes_no_results_gets_no_further_plays(ledger: MemoryLedger, engine: FakeEngine) -> None:
    """The worker's memory would grow with every result that waits."""
    ledger.add(own_jobs(TASK, 40))
    ledger.fails = lambda path: 503 if path == "/v1/results" else None
    async with worker(ledger, engine) as (loop, _):
        await ledger.until(lambda: len(ledger.leases) == 4)
        beats = len(ledger.heartbeats)
        await ledger.until(lambda: len(loop._outbox.results) == 4 and len(ledger.heartbeats) > beats + 5)
        assert len(ledger.pool) == 36
        ledger.fails = lambda path: None
        await ledger.until(lambda: len(ledger.settled) == 40)


class Failing(Sums):
    """Plays of every other job raise at first."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: set[bytes] = set()

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        if job.job[-1] % 2 and job.job not in self.failed:
            self.failed.add(job.job)
            raise ZeroDivisionError("oops")
        return await super().play(sampler, job)


async def test_a_play_that_raises_costs_its_lease_only(ledger: MemoryLedger, engine: FakeEngine) -> None:
    task = Failing()
    ledger.add(own_jobs(task, 10))
    ledger.finish_when_empty = True
    async with worker(ledger, engine, task) as (loop, running):
        await running
        assert loop.verdicts == {"accepted": 10, "failed": 5, "returned": 5}
        assert loop._rests_until <= asyncio.get_running_loop().time()
    assert len(ledger.returned) == 5
    assert set(ledger.reasons) == {("failed play", "ZeroDivisionError: oops")}


class Raising(Sums):
    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        raise ValueError("no\nsuch " + 500 * "card ")


async def test_a_job_that_fails_again_lets_leasing_rest(
    ledger: MemoryLedger, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older ledger leases it again at once."""
    monkeypatch.setattr(play_loop, "REPEAT_S", 3600.0)
    task = Raising()
    ledger.add(own_jobs(task, 1))
    async with worker(ledger, engine, task) as (loop, _):
        await ledger.until(lambda: len(ledger.returned) == 2)
        assert loop._rests_until > asyncio.get_running_loop().time()
    reason, detail = ledger.reasons[0]
    assert (reason, len(detail)) == ("failed play", MAX_DETAIL)
    assert detail.startswith("ValueError: no\N{REPLACEMENT CHARACTER}such card")


class CatchesAll(Sums):
    """The sampler's errors become others."""

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        try:
            return await super().play(sampler, job)
        except Exception:  # noqa: BLE001
            raise KeyError("answer") from None


@pytest.mark.parametrize("task", [TASK, CatchesAll()])
@pytest.mark.parametrize(
    ("status", "reason"), [(400, "refused prompt"), (422, "refused prompt"), (500, "engine"), (404, "engine")]
)
async def test_a_return_tells_the_engines_fault_from_the_jobs(
    ledger: MemoryLedger, engine: FakeEngine, task: Task, status: int, reason: str
) -> None:
    engine.status = status
    ledger.add(own_jobs(task, 1))
    async with worker(ledger, engine, task):
        await ledger.until(lambda: bool(ledger.returned))
    assert ledger.reasons[0][0] == reason


async def test_a_prompt_without_room_for_its_limit_is_refused(ledger: MemoryLedger, engine: FakeEngine) -> None:
    jobs = own_jobs(TASK, 1)
    engine.max_model_len = len(jobs[0].prompt) + 3
    ledger.add(jobs)
    async with worker(ledger, engine):
        await ledger.until(lambda: bool(ledger.returned))
    reason, detail = ledger.reasons[0]
    assert reason == "refused prompt"
    assert "--max-model-len" in detail


async def test_an_engine_that_fails_at_one_job_alone_refuses_its_prompt(
    ledger: MemoryLedger, engine: FakeEngine
) -> None:
    bad, *others = own_jobs(TASK, 40)
    others = [job for job in others if job.prompt != bad.prompt]

    faulty: list[int] = []

    def asked(_: int) -> None:
        found = engine.asked[-1]["token_ids"]
        faulty.extend([] if faulty else found)
        engine.status = 500 if found == faulty else 200

    engine.on_asked = asked
    ledger.add([bad])
    async with worker(ledger, engine):
        for count in range(1, MAX_ENGINE_FAULTS + 1):
            await ledger.until(lambda count=count: len(ledger.returned) >= count)
            ledger.add([others.pop() for _ in range(4)])
            await ledger.until(lambda count=count: len(ledger.settled) == 4 * count)
        await ledger.until(lambda: "refused prompt" in [reason for reason, _ in ledger.reasons])
    reasons = [reason for reason, _ in ledger.reasons]
    assert reasons.index("refused prompt") >= MAX_ENGINE_FAULTS - 1


class Hanging(Sums):
    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        await super().play(sampler, job)
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("task", "reason"), [(Hanging(), "hung play"), (TASK, "engine")])
async def test_a_play_without_time_left_hangs_unless_the_engine_owes_an_answer(
    ledger: MemoryLedger, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, task: Task, reason: str
) -> None:
    monkeypatch.setattr(play_loop, "LATE_S", 0.3)
    monkeypatch.setattr(memory_ledger, "LATEST_S", 0.0)
    if task is TASK:
        engine.gate.clear()
    ledger.add(own_jobs(task, 1))
    async with worker(ledger, engine, task):
        await ledger.until(lambda: reason in dict(ledger.reasons))


class Forging(Sums):
    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        played = await super().play(sampler, job)
        return replace(played, token_ids=np.full_like(played.token_ids, 99))

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return 0.0


async def test_a_result_that_the_ledger_would_blame_is_not_handed_in(ledger: MemoryLedger, engine: FakeEngine) -> None:
    task = Forging()
    ledger.add(own_jobs(task, 1))
    async with worker(ledger, engine, task) as (loop, _):
        await ledger.until(lambda: bool(ledger.returned))
        assert loop.verdicts["failed"] >= 1
    assert not ledger.bodies
    assert ledger.reasons[0][0] == "invalid play"


async def test_experts_that_no_model_chooses_are_left_out_of_a_result(
    ledger: MemoryLedger, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may lack the experts of a prompt's first tokens, and send zeros."""
    whole = fake_engine.routed

    def routed(places: Sequence[int], layers: int, top_k: int) -> np.ndarray:
        return whole(places, layers, top_k) * (np.array(places) > 1)[:, None, None].astype("u1")

    monkeypatch.setattr(fake_engine, "routed", routed)
    engine.experts = (3, 2)
    ledger.add(own_jobs(TASK, 3))
    ledger.finish_when_empty = True
    async with worker(ledger, engine) as (loop, running):
        await running
        assert loop.verdicts == {"accepted": 3}
    assert all(result.routed_experts is None for result in ledger.settled.values())


class Unchecked(Sums):
    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        raise CheckFailedError("the check took longer than 1 s")


async def test_a_failed_check_leaves_the_result_with_a_tag(ledger: MemoryLedger, engine: FakeEngine) -> None:
    task = Unchecked()
    ledger.add(own_jobs(task, 1))
    ledger.finish_when_empty = True
    async with worker(ledger, engine, task) as (_, running):
        await running
    (result,) = ledger.settled.values()
    assert (result.reward, dict(result.tags or ())) == (0.0, {"check": "the check took longer than 1 s"})


async def test_jobs_of_another_task_go_back(ledger: MemoryLedger, engine: FakeEngine) -> None:
    ledger.add(own_jobs(Sums(3), 1))
    async with worker(ledger, engine):
        await ledger.until(lambda: len(ledger.returned) == 2)
    assert not engine.asked
    assert set(ledger.reasons) == {("unfit", "")}


# -- a ledger that fails


@pytest.mark.parametrize("status", [503, 429, 500, -1])
@pytest.mark.parametrize("path", ["/v1/workers", "/v1/lease", "/v1/heartbeat", "/v1/results"])
async def test_requests_are_repeated_until_the_ledger_answers(
    ledger: MemoryLedger, engine: FakeEngine, path: str, status: int
) -> None:
    failures = iter([status] * 3)
    ledger.fails = lambda asked: next(failures, None) if asked == path else None
    ledger.add(own_jobs(TASK, 12))
    async with worker(ledger, engine, slots=3):
        lost = 9 if (path, status) == ("/v1/lease", -1) else 0  # leases whose answer was lost end by their time
        await ledger.until(lambda: len(ledger.settled) == 12 - lost)
        if path == "/v1/heartbeat":
            await ledger.until(lambda: next(failures, None) is None and bool(ledger.heartbeats))
    assert all(result == ledger.settled[job] for (job, _), result in ledger.results.items()), (
        "a repeated result has the same body"
    )


async def test_a_ledger_that_forgot_the_session_gets_the_results_in_a_new_one(
    ledger: MemoryLedger, engine: FakeEngine
) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(TASK, 8))
    async with worker(ledger, engine, slots=8):
        await engine.until_running(8)
        ledger.session += 10
        engine.gate.set()
        await ledger.until(lambda: len(ledger.settled) == 8)
    assert len(ledger.registrations) == 2


async def test_a_wrong_bearer_ends_the_worker(ledger: MemoryLedger, engine: FakeEngine) -> None:
    async with worker(ledger, engine, bearer="wrong") as (_, running):
        with pytest.raises(RefusedError, match="401"):
            await running


@pytest.mark.parametrize("status", [409, 413, 400])
async def test_a_refused_result_costs_no_other(ledger: MemoryLedger, engine: FakeEngine, status: int) -> None:
    refused = iter([status, status])
    ledger.fails = lambda asked: next(refused, None) if asked == "/v1/results" else None
    engine.gate.clear()
    ledger.add(own_jobs(TASK, 4))
    async with worker(ledger, engine) as (loop, _):
        await engine.until_running(4)
        engine.gate.set()
        await ledger.until(lambda: len(ledger.settled) >= 2)
        await ledger.until(lambda: len(ledger.settled) + loop.verdicts["refused"] == 4)
        assert loop.verdicts["refused"] <= 2


# -- drain


async def test_a_drained_worker_finishes_its_plays(ledger: MemoryLedger, engine: FakeEngine) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(TASK, 20))
    async with worker(ledger, engine) as (loop, running):
        await engine.until_running(4)
        draining = asyncio.create_task(loop.drain())
        engine.gate.set()
        await running
        await draining
    assert not ledger.leases
    assert len(ledger.settled) >= 4
    assert len(ledger.settled) + len(ledger.pool) == 20


async def test_plays_that_do_not_end_in_time_go_back(ledger: MemoryLedger, engine: FakeEngine) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(TASK, 20))
    async with worker(ledger, engine, drain_s=0.05) as (loop, running):
        await engine.until_running(4)
        await loop.drain()
        await running
        assert loop.verdicts["returned"] >= 4
    assert set(ledger.reasons) == {("drained", "")}
    assert not ledger.leases
    assert len(ledger.pool) == 20
    assert not ledger.settled
