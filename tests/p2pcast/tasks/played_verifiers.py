"""Plays with the real package verifiers. ``test_verifiers_bridge.py`` runs this module in an environment of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scripted_sampler import ScriptedSampler, jobs_of

from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import fault
from p2pcast.tasks.play import result_of
from p2pcast.tasks.task import ForgedPlayError
from p2pcast.tasks.task_loader import load_task
from p2pcast.tasks.task_process import TaskProcesses
from p2pcast.tasks.verifiers_bridge import Verifiers

END = 3


@pytest.fixture(autouse=True)
def _tasksets_beside_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[3]}:{Path(__file__).parent}")


def said(text: str) -> list[int]:
    return [*text.encode(), END]


def guessing(secret: int, **settings: int) -> tuple[Verifiers, Job]:
    task = Verifiers("bytes", "guess-number", **{"turn_tokens": 32, "max_turns": 4} | settings)
    jobs = jobs_of(task, 5)
    return task, next(job for job in jobs if f'"secret":{secret}'.encode() in job.prompt)


async def played(task: Verifiers, job: Job, *turns: list[int]) -> tuple[float, str, int]:
    found = await task.play(ScriptedSampler(list(turns)), job)
    reward = task.reward(job, found.token_ids, found.mask)
    assert fault(result_of(job, bytes(16), found, reward), task.vocabulary) is None
    return reward, found.stop, len(found.turns)


async def test_an_exchange_of_several_turns_gets_the_environments_reward() -> None:
    task, job = guessing(3)
    assert await played(task, job, said("0"), said("<think>hm</think> 4"), said("3")) == (1.5, "task", 3)
    assert await played(task, job, said("1000"), said("1000"), said("1000"), said("1000")) == (0.0, "task", 4)


async def test_sampled_tokens_are_kept_in_the_next_prompt() -> None:
    task, job = guessing(3)
    odd = [255, 254, END]  # no text
    found = await task.play(ScriptedSampler([odd, said("3")]), job)
    assert found.token_ids[found.mask == 1].tolist() == [*odd, *said("3")]
    assert b"Less." in bytes(found.token_ids[found.mask == 0].tolist())


async def test_a_stop_condition_a_cut_turn_and_the_last_turn_end_the_exchange() -> None:
    task, job = guessing(3)
    assert await played(task, job, said("stop")) == (0.0, "task", 1)
    assert await played(task, job, [*b"3".ljust(32)]) == (1.5, "length", 1)
    task, job = guessing(3, max_turns=2)
    assert await played(task, job, said("0"), said("1")) == (0.5, "task", 2)


async def test_a_single_turn_of_an_endless_taskset_is_played() -> None:
    task = Verifiers("bytes", "short_answer", turn_tokens=32, max_turns=1)
    for job in jobs_of(task, 3, seed=5):
        answer = job.prompt.partition(b'"answer":"')[2].partition(b'"')[0].decode()
        assert await played(task, job, said(answer)) == (1.0, "task", 1)
        assert await played(task, job, said("no")) == (0.0, "task", 1)
    assert [job.prompt for job in jobs_of(task, 3, seed=5)] != [job.prompt for job in jobs_of(task, 3, seed=6)]


async def test_changed_tokens_of_the_environment_are_refused() -> None:
    task, job = guessing(3)
    found = await task.play(ScriptedSampler([said("0"), said("3")]), job)
    for place in np.flatnonzero(found.mask == 0):
        forged = found.token_ids.copy()
        forged[place] ^= 1
        with pytest.raises(ForgedPlayError):
            task.reward(job, forged, found.mask)
    for count in range(1, len(found.token_ids)):
        if found.mask[count - 1] == 0:
            with pytest.raises(ForgedPlayError):
                task.reward(job, found.token_ids[:count], found.mask[:count])


async def test_rewards_are_computed_again_in_a_process() -> None:
    name = "verifiers,tokenizer=bytes,taskset=guess_number,turn_tokens=32,max_turns=4"
    task = load_task(name)
    _, job = guessing(2)
    found = await task.play(ScriptedSampler([said("0"), said("2")]), job)
    checks = TaskProcesses(name, task.hash)
    try:
        assert await checks.check([(job, result_of(job, bytes(16), found, 0.0))]) == [1.5]
    finally:
        await checks.close()


def test_the_hash_covers_settings_and_taskset() -> None:
    hashes = {guessing(1)[0].hash, guessing(1, max_turns=2)[0].hash, Verifiers("bytes", "short_answer").hash}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("taskset", "environment", "why"),
    [
        ("in_a_container", "", "needs a container"),
        ("guess_number", "user-sim", "with one agent; this one has 2"),
        ("no_such_taskset", "", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_environments_beyond_text_are_refused_with_the_reason(taskset: str, environment: str, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        Verifiers("bytes", taskset, environment)


@pytest.mark.parametrize("prompt", [b"", b"{}", b"[1]", b'{"secret": "x"}'])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    task, job = guessing(3)
    with pytest.raises(RemoteError):
        task.reward(dataclasses.replace(job, prompt=prompt), np.zeros(1, "<u4"), np.zeros(1, "u1"))
