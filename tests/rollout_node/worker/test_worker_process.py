"""``p2pcast work`` and ``p2pcast task try`` as real processes, ended by signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_sampler import jobs_of

from p2pcast.rollouts.job import Job
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Task
from tests.support.fake_engine import FakeEngine
from tests.support.memory_ledger import BEARER, MemoryLedger

END_S = 600.0


def own_jobs(task: Task, count: int) -> list[Job]:
    return [replace(job, job=(number + 1).to_bytes(16, "big")) for number, job in enumerate(jobs_of(task, count))]


async def command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "p2pcast.cli",
        *arguments,
        env=os.environ | {"P2PCAST_LEDGER_TOKEN": BEARER},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@contextlib.asynccontextmanager
async def working(
    ledger: MemoryLedger, engine: FakeEngine, *more: str, task: str = "sums"
) -> AsyncIterator[asyncio.subprocess.Process]:
    where = ["--engine", engine.url, "--peer", engine.url.removeprefix("http://"), "--task", task, "--slots", "4"]
    process = await command("work", ledger.url, *where, "--name", "w", *more)
    try:
        async with asyncio.timeout(END_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    _, said = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.parametrize("task", ["sums", "leduc"])
async def test_a_worker_plays_a_whole_run_and_ends(ledger: MemoryLedger, engine: FakeEngine, task: str) -> None:
    from p2pcast.tasks.task_loader import load_task

    if task == "leduc":
        pytest.importorskip("pyspiel", reason="needs the extra leduc")
    loaded = load_task(task)
    jobs = own_jobs(loaded, 30)
    ledger.add(jobs)
    ledger.finish_when_empty = True
    async with working(ledger, engine, task=task) as process:
        code, said = await ended(process)
        assert code == 0, said
    assert set(ledger.settled) == {job.job for job in jobs}
    for job in jobs:
        result = ledger.settled[job.job]
        assert result.reward == loaded.reward(job, result.token_ids, result.mask)
        assert not any(key == "check" for key, _ in result.tags or ())


async def test_a_worker_plays_through_completions(ledger: MemoryLedger, engine: FakeEngine) -> None:
    engine.kv = "drain"
    jobs = own_jobs(Sums(), 30)
    ledger.add(jobs)
    ledger.finish_when_empty = True
    async with working(ledger, engine, "--sampler", "completions") as process:
        code, said = await ended(process)
        assert code == 0, said
    assert set(ledger.settled) == {job.job for job in jobs}
    assert all("prompt" in body for body in engine.asked)


async def test_sigterm_lets_plays_end(ledger: MemoryLedger, engine: FakeEngine) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(Sums(), 20))
    async with working(ledger, engine) as process:
        await until_leased(ledger, engine)
        process.send_signal(signal.SIGTERM)
        ledger_pool = len(ledger.pool)
        engine.gate.set()
        code, said = await ended(process)
        assert code == 0, said
    assert not ledger.leases
    assert len(ledger.settled) >= 4
    assert ledger_pool - len(ledger.pool) <= len(ledger.settled)


async def test_sigterm_gives_back_plays_that_do_not_end(ledger: MemoryLedger, engine: FakeEngine) -> None:
    engine.gate.clear()
    ledger.add(own_jobs(Sums(), 20))
    async with working(ledger, engine, "--drain", "0.1") as process:
        await until_leased(ledger, engine)
        process.send_signal(signal.SIGTERM)
        code, said = await ended(process)
        assert code == 0, said
    assert not ledger.leases
    assert len(ledger.pool) == 20
    await engine.until_cut(4)


async def test_the_jobs_of_a_killed_worker_are_played_by_the_next_one(ledger: MemoryLedger, engine: FakeEngine) -> None:
    jobs = own_jobs(Sums(), 12)
    ledger.add(jobs)
    ledger.finish_when_empty = True
    for _ in range(2):
        engine.gate.clear()
        async with working(ledger, engine) as process:
            await until_leased(ledger, engine)
            process.kill()
            await process.wait()
        await engine.until_cut(4)
        ledger.add(ledger.leases.values())  # the leases have expired
        ledger.leases.clear()
        engine.cut = 0
    engine.gate.set()
    async with working(ledger, engine) as process:
        code, said = await ended(process)
        assert code == 0, said
    assert set(ledger.settled) == {job.job for job in jobs}
    assert len(ledger.results) == len(jobs)


async def test_a_killed_worker_leaves_no_process_behind(ledger: MemoryLedger, engine: FakeEngine) -> None:
    ledger.add(own_jobs(Sums(), 4))
    async with working(ledger, engine) as process:
        await ledger.until(lambda: len(ledger.settled) == 4)
        children = children_of(process.pid)
        handles = [os.pidfd_open(child) for child in children]
        assert handles
        process.kill()
        await process.wait()
        for handle in handles:
            await asyncio.to_thread(wait_for_end, handle)


def wait_for_end(handle: int) -> None:
    import select

    assert select.select([handle], [], [], END_S)[0]
    os.close(handle)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("change", "why"),
    [({"scale_out": False}, "--enable-scale-out"), ({"mode": "raw"}, "--logprobs-mode processed_logprobs")],
)
async def test_an_unfit_engine_is_one_line_and_exit_code_1(
    ledger: MemoryLedger, engine: FakeEngine, change: dict[str, object], why: str
) -> None:
    for name, value in change.items():
        setattr(engine, name, value)
    async with working(ledger, engine) as process:
        code, said = await ended(process)
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("p2pcast: ")]
    assert why in line
    assert not ledger.registrations


async def test_completions_of_an_engine_that_switches_under_requests_are_refused(
    ledger: MemoryLedger, engine: FakeEngine
) -> None:
    async with working(ledger, engine, "--sampler", "completions") as process:
        code, said = await ended(process)
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("p2pcast: ")]
    assert "--commit-safe-point drain" in line
    assert not ledger.registrations


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["http://10.1.2.3:7079"], "not encrypted"),
        (["https://10.1.2.3:7079"], "give --hub HOST:PORT and --token-file FILE"),
        (["http://127.0.0.1:1", "--hub", "127.0.0.1:1"], "takes no certificate"),
        (["127.0.0.1:1", "--token-file", "token"], "give --hub HOST:PORT too"),
        (["127.0.0.1:1", "--hub", "127.0.0.1:1", "--bearer-file", "bearer"], "shows a certificate"),
        (["127.0.0.1:1", "--task", "nothing"], "no task is called"),
        (["127.0.0.1:1", "--engine", "localhost"], "not a URL"),
    ],
)
async def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: list[str], why: str) -> None:
    usual = ["--engine", "http://127.0.0.1:1", "--peer", "1", "--task", "sums"]
    process = await command("work", arguments[0], *usual, *arguments[1:])
    code, said = await ended(process)
    assert (code, why in said) == (2, True), said


async def test_task_try_prints_tokens_with_their_mask_and_rewards(engine: FakeEngine) -> None:
    process = await command("task", "try", "sums", "--engine", engine.url, "--jobs", "4", "--json")
    out, said = await process.communicate()
    assert process.returncode == 0, said
    document = json.loads(out)
    assert document["hash"] == Sums().hash.hex()
    assert len(document["plays"]) == 4
    for play in document["plays"]:
        assert len(play["mask"]) == len(play["token_ids"]) == len(play["logprobs"])
        assert sum(play["mask"]) > 0
    process = await command("task", "try", "sums", "--engine", engine.url, "--jobs", "1")
    out, _ = await process.communicate()
    assert b"<begin>" in out
    assert b"reward 0" in out
    assert b"1 plays, mean reward 0" in out
    held_out = Sums(held_out=10)
    words = ["sums,held_out=10", "--held-out", "--engine", engine.url, "--jobs", "4", "--json"]
    process = await command("task", "try", *words)
    out, said = await process.communicate()
    assert process.returncode == 0, said
    document = json.loads(out)
    assert document["mean_reward"] == 0
    assert all(held_out.held_out(play["prompt"].encode()) for play in document["plays"])


async def until_leased(ledger: MemoryLedger, engine: FakeEngine) -> None:
    """The plays have begun; probes do not count, as they do not stream."""
    engine.gate.clear()
    await engine.until_running(4)
    assert len(ledger.leases) == 4
