from __future__ import annotations

import dataclasses

import pytest
from scripted_sampler import ScriptedSampler, jobs_of

from p2pcast.ground.errors import RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.sums import END, VOCABULARY, Sums, decode, encode, prompt_ids


async def rewarded(job: Job, answer: list[int]) -> float:
    task = Sums()
    found = await task.play(ScriptedSampler([answer]), job)
    return task.reward(job, found.token_ids, found.mask)


def asked(prompt: bytes) -> Job:
    return dataclasses.replace(jobs_of(Sums(), 1)[0], prompt=prompt)


async def test_only_the_exact_sum_is_rewarded() -> None:
    job = asked(b"17+25")
    assert await rewarded(job, [*encode("42"), END]) == 1.0
    for wrong in ([*encode("43"), END], [*encode("042"), END], encode("42"), [END], [*encode("4+2"), END]):
        assert await rewarded(job, wrong) == 0.0


def test_prompts_are_tokens_of_single_characters() -> None:
    assert decode(prompt_ids(asked(b"17+25"))) == "<begin>17+25="
    for job in jobs_of(Sums(3), 50):
        assert max(prompt_ids(job)) < VOCABULARY
        assert len(prompt_ids(job)) == len(job.prompt) + 2


def test_every_sum_fits_the_limit_of_its_job() -> None:
    for job in jobs_of(Sums(), 200):
        left, right = map(int, job.prompt.split(b"+"))
        assert len(str(left + right)) + 1 <= job.max_tokens


@pytest.mark.parametrize("prompt", [b"", b"1+", b"1-2", b"1+2\n", b"1+2+3", "١+٢".encode(), b"1" * 30 + b"+1"])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    with pytest.raises(RemoteError):
        prompt_ids(asked(prompt))


def test_settings_are_part_of_the_hash() -> None:
    assert Sums(1).hash != Sums(2).hash
    assert Sums(2).hash == Sums().hash
