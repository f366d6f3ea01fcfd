"""The share of an honest worker beside workers that hand in hostile answers of ``math``, with a real reward process.
The share is one of processor time, whatever the load of the machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pcast.ground import limits
from p2pcast.tasks.task_process import TaskProcesses
from tests.p2pcast.tasks.scripted_sampler import ScriptedSampler, jobs_of
from trainer_node.ledger_server.rewards import reward_desk
from trainer_node.ledger_server.rewards.reward_desk import RewardDesk

pytest.importorskip("math_verify", reason="needs the extra math")

from p2pcast.tasks.math_task import Math

TASK = Math("bytes")
(END,) = TASK.stop_token_ids
HONEST = 60
"""Results of the honest worker."""
HUGE = ("(1+i)^{999}", "(a+b+c+d+e+f+g+h)^{99}", "\\sin(\\exp(999999999))")


@pytest.fixture
async def checks() -> AsyncIterator[TaskProcesses]:
    found = TaskProcesses("math,tokenizer=bytes", TASK.hash, check_s=600, memory_bytes=limits.GIB)
    yield found
    await found.close()


async def answered(text: str):
    prompt = json.dumps({"question": "1+1?", "answer": "2"}).encode()
    job = dataclasses.replace(jobs_of(TASK, 1)[0], prompt=prompt, max_tokens=200_000)
    return job, await TASK.play(ScriptedSampler([[*text.encode(), END]]), job)


class Desk:
    """The ledger's desk of rewards, before a real process. ``cpu_s``: by worker."""

    def __init__(self, checks: TaskProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checks, self.cpu_s, self.done = checks, Counter[str](), Counter[str]()
        self.pid = 0
        monkeypatch.setattr(reward_desk.Turns.__init__, "__defaults__", (None, self.clock_s))
        self.desk = RewardDesk(self._score, 1)

    def clock_s(self) -> float:
        """Processor time of the reward process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def begin(self) -> None:
        """The process runs, and has loaded what a comparison needs."""
        job, play = await answered("\\boxed{\\frac{4}{2}}")
        await self.checks.reward(job, play.token_ids, play.mask)
        [checker] = self.checks._idle
        self.pid = checker.child._process.pid

    async def _score(self, handed_in) -> list[float]:
        """One check, as of a worker whose results come one by one."""
        (job, result), began_s = handed_in[0], self.clock_s()
        found = await self.checks.reward(job, result.token_ids, result.mask)
        self.cpu_s[result.worker] += self.clock_s() - began_s
        self.done[result.worker] += 1
        return [found]

    async def work(self, worker: str, text: str, until) -> list[float]:
        """A worker that hands in the same answer as often as it can."""
        job, play = await answered(text)
        found: list[float] = []
        while not until():
            lease = os.urandom(16)
            result = SimpleNamespace(
                worker=worker, token_ids=play.token_ids, mask=play.mask, job=lease, lease=lease, digest=lambda: b""
            )
            async with self.desk.rewards(worker, [job], [result]) as rewards:
                found += rewards
        return found


async def test_honest_results_beside_hostile_answers_get_half_of_the_time(checks, monkeypatch) -> None:
    """The hostile worker has two requests of each answer at a time, and the honest worker has two."""
    desk = Desk(checks, monkeypatch)
    await desk.begin()

    def over() -> bool:
        return desk.done["honest"] >= HONEST

    hostile = [desk.work("hostile", f"\\boxed{{{text}}}", over) for text in HUGE for _ in range(2)]
    honest = [desk.work("honest", "\\boxed{\\frac{4}{2}}", over) for _ in range(2)]
    *others, one, two = await asyncio.gather(*hostile, *honest)
    assert {*one, *two} == {0.9}
    assert {reward for rewards in others for reward in rewards} <= {0.0, 0.15, 0.2}
    assert desk.done["hostile"] <= desk.done["honest"] + len(hostile), (
        "every second check, and those that waited at the end"
    )
    assert desk.cpu_s["hostile"] <= desk.cpu_s["honest"] + TASK.check_cpu_s
    assert checks.failed == 0
