"""``p2pcast work`` as a real process, whose task's plays block, crash or take all memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hostile_plays import HostilePlays
from scripted_sampler import jobs_of

from p2pcast.rollouts.job import Job
from tests.support.fake_engine import FakeEngine
from tests.support.memory_ledger import BEARER, MemoryLedger

FOLDER = Path(__file__).parents[2] / "p2pcast" / "tasks"
NAME = "hostile_plays:HostilePlays"
END_S = 600.0
HOSTILE = ["sleep", "regex", "exit", "leave", "memory", "forge tokens"]


def jobs(*prompts: str) -> list[Job]:
    made = jobs_of(HostilePlays(), len(prompts))
    return [
        dataclasses.replace(job, prompt=prompt.encode(), job=(number + 1).to_bytes(16, "big"))
        for number, (job, prompt) in enumerate(zip(made, prompts, strict=True))
    ]


async def command(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pcast.cli", *words),
        env=os.environ | {"P2PCAST_LEDGER_TOKEN": BEARER},
        stderr=asyncio.subprocess.PIPE,
        cwd=FOLDER,
    )


@contextlib.asynccontextmanager
async def working(ledger: MemoryLedger, engine: FakeEngine, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    where = ["--engine", engine.url, "--peer", engine.url.removeprefix("http://"), "--task", NAME]
    process = await command("work", ledger.url, *where, "--name", "w", *more)
    try:
        async with asyncio.timeout(END_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_honest_plays_are_finished_beside_hostile_plays(ledger: MemoryLedger, engine: FakeEngine) -> None:
    played = jobs(*["good"] * 4, *HOSTILE, *["good"] * 4)
    ledger.add(played)
    ledger.rejects = ledger.finish_when_empty = True
    async with working(ledger, engine, "--slots", "16", "--play-step", "3", "--play-memory", "512") as process:
        _, said = await process.communicate()
        assert process.returncode == 0, said.decode()
    assert set(ledger.settled) == {job.job for job in played if job.prompt == b"good"}, said.decode()
    assert len(ledger.returned) == len(HOSTILE)
    assert {reason for reason, _ in ledger.reasons} == {"failed play", "hung play", "invalid play"}
    for job in played:
        if job.prompt == b"good":
            result = ledger.settled[job.job]
            assert result.reward == HostilePlays().reward(job, result.token_ids, result.mask)


@pytest.mark.parametrize("prompt", ["sleep", "stubborn"])
async def test_sigterm_ends_a_worker_whose_play_does_not_end(
    ledger: MemoryLedger, engine: FakeEngine, prompt: str
) -> None:
    ledger.add(jobs(prompt))
    async with working(ledger, engine, "--play-step", "3600", "--drain", "0.1") as process:
        await ledger.until(lambda: any(sum(counts) for counts in ledger.tokens.values()))
        process.send_signal(signal.SIGTERM)
        _, said = await process.communicate()
        assert process.returncode == 0, said.decode()
    assert len(ledger.returned) == 1


async def test_a_trial_of_a_task_ends_with_a_hostile_play(engine: FakeEngine, tmp_path: Path) -> None:
    """The command has no blocked event loop, and its error names the play."""
    (tmp_path / "raising_play.py").write_text(
        "from hostile_plays import HostilePlays\nfrom p2pcast.tasks.task import Prompt\n\n\n"
        "class RaisingPlay(HostilePlays):\n    def jobs(self, seed):\n"
        "        while True:\n            yield Prompt(b'leave', 4)\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pcast.cli", "task", "try", "raising_play:RaisingPlay", "--engine", engine.url),
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    assert "p2pcast: the play raised SystemExit: 3" in said.decode()
