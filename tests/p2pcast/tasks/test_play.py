"""Properties that hold for the plays of every task."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_sampler import PlayerSampler, RandomSampler, jobs_of

from p2pcast.ground.errors import RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result, fault
from p2pcast.tasks import task_checker
from p2pcast.tasks.holdem import Holdem
from p2pcast.tasks.leduc import ACTIONS, Leduc
from p2pcast.tasks.math_task import Math
from p2pcast.tasks.play import Play, Replay, result_of
from p2pcast.tasks.sums import END, Sums, encode
from p2pcast.tasks.task import ForgedPlayError, Sample, Task, Trajectory, turn_seed

CHOICES = {"sums": [*encode("0123456789"), END], "leduc": [*ACTIONS, END], "math": [*b"\\boxed{3} ", 3], "holdem": []}
TASKS: dict[str, Task] = {
    "sums": Sums(1),
    "leduc": Leduc(),
    "math": Math("bytes", max_tokens=24),
    "holdem": Holdem("bytes", stack=40),
}
PACKAGES = {"leduc": "pyspiel", "math": "math_verify", "holdem": "pokerkit"}
SINGLE_TURN = ("sums", "math")


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    if request.param in PACKAGES:
        pytest.importorskip(PACKAGES[request.param], reason=f"needs the extra {request.param}")
    return TASKS[request.param]


async def played(task: Task, count: int = 60) -> list[tuple[Job, Trajectory, RandomSampler]]:
    out = []
    for job in jobs_of(task, count, size=2):
        sampler = PlayerSampler([]) if task.name == "holdem" else RandomSampler(CHOICES[task.name])
        out.append((job, await task.play(sampler, job), sampler))
    return out


async def test_results_of_plays_have_no_fault_and_survive_their_bytes(task: Task) -> None:
    for job, found, _ in await played(task):
        result = result_of(job, bytes(16), found, task.reward(job, found.token_ids, found.mask))
        assert fault(result, task.vocabulary) is None
        assert Result.from_bytes(result.to_bytes()) == result


def claims(found: Trajectory) -> list[object]:
    return [found.stop, found.turns.tobytes(), None]


async def check(task: Task, job: object, token_ids: np.ndarray, mask: np.ndarray, *said: object) -> None:
    """Raises ForgedPlayError. In a thread: an event loop runs in this one."""

    def checked() -> None:
        with task_checker.CheckLoop() as loop:
            task_checker.check_claims(task, job, token_ids, mask, loop, *said)

    await asyncio.to_thread(checked)


async def test_every_play_is_found_again_with_its_stop_and_turns(task: Task) -> None:
    for job, found, _ in await played(task):
        said = (job, found.token_ids, found.mask, *claims(found))
        await check(task, *said)


async def test_a_play_with_another_stop_or_other_turns_is_refused(task: Task) -> None:
    job, found, _ = (await played(task, 1))[0]
    stop, turns, loss = claims(found)
    others: tuple[set[Any], ...] = (
        {"end", "length", "task"} - {stop},
        {b"", bytes(4) + turns},
        {b"", found.mask.tobytes()},
    )
    for place, values in enumerate(others):
        for value in values:
            said = [stop, turns, loss]
            said[place] = value
            with pytest.raises(ForgedPlayError):
                await check(task, job, found.token_ids, found.mask, *said)


async def test_a_turn_that_was_cut_short_is_refused() -> None:
    """A worker that ends its samples early would choose among them."""
    job, found, _ = next(one for one in await played(TASKS["sums"]) if len(one[1].token_ids) == one[1].turns[0] + 3)
    cut = found.token_ids[:-1], found.mask[:-1]
    for stop in ("end", "length"):
        with pytest.raises(ForgedPlayError, match="ends before its limit"):
            await check(TASKS["sums"], job, *cut, stop, None, None)


class Halved(Sums):
    """Learns from the first sampled token alone."""

    def loss_mask(self, job: object, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        first = np.zeros(len(mask), "u1")
        first[int(mask.argmax())] = 1
        return first


async def test_a_loss_mask_is_the_tasks() -> None:
    task = Halved(1)
    job, found, _ = (await played(task, 1))[0]
    for loss, fits in ((task.loss_mask(job, found.token_ids, found.mask), True), (found.mask, False), (None, False)):
        said = [found.stop, None, None if loss is None else loss.tobytes()]
        asked = check(task, job, found.token_ids, found.mask, *said)
        if fits:
            await asked
        else:
            with pytest.raises(ForgedPlayError, match="loss mask"):
                await asked


async def test_equal_jobs_give_equal_plays_and_rewards(task: Task) -> None:
    first, second = await played(task), await played(task)
    for (job, one, _), (_, other, _) in zip(first, second, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert task.reward(job, one.token_ids, one.mask) == task.reward(job, other.token_ids, other.mask)


async def test_each_prompt_extends_the_last_prompt(task: Task) -> None:
    several = 0
    for _, found, sampler in await played(task):
        several += len(sampler.prompts) > 1
        for prompt, start in zip(sampler.prompts, found.turns.tolist(), strict=True):
            assert found.token_ids[:start].tolist() == list(prompt)
            assert found.mask[start] == 1
            assert found.mask[start - 1] == 0
    assert several or task.name in SINGLE_TURN


async def test_the_mask_is_set_on_sampled_tokens_alone(task: Task) -> None:
    for _, found, _ in await played(task):
        sampled = np.concatenate([np.arange(s.start, s.end) for s in found.spans])
        assert sampled.tolist() == np.flatnonzero(found.mask).tolist()
        assert not found.logprobs[found.mask == 0].any()
        assert (found.logprobs[found.mask == 1] == -1.0 - found.token_ids[found.mask == 1]).all()


async def test_a_changed_token_of_the_task_is_refused(task: Task) -> None:
    for job, found, _ in await played(task, 10):
        for place in np.flatnonzero(found.mask == 0):
            forged = found.token_ids.copy()
            forged[place] = (forged[place] + 1) % task.vocabulary
            with pytest.raises(ForgedPlayError):
                task.reward(job, forged, found.mask)


async def test_more_tokens_than_the_play_are_refused(task: Task) -> None:
    for job, found, _ in await played(task, 10):
        for value in (0, 1):
            longer = np.append(found.token_ids, np.uint32(END))
            mask = np.append(found.mask, np.uint8(value))
            answered = len(found.token_ids) - int(found.turns[-1])
            if value and answered < job.max_tokens and task.name == "sums":
                continue  # a longer answer, which is a play too
            with pytest.raises(ForgedPlayError):
                task.reward(job, longer, mask)


async def test_the_environments_tokens_cannot_be_claimed_as_sampled(task: Task) -> None:
    for job, found, _ in await played(task, 10):
        mask = found.mask.copy()
        mask[0] = 1
        with pytest.raises(ForgedPlayError):
            task.reward(job, found.token_ids, mask)


def test_jobs_depend_on_the_seed_alone(task: Task) -> None:
    assert [job.prompt for job in jobs_of(task, 20, 1)] == [job.prompt for job in jobs_of(task, 20, 1)]
    assert [job.prompt for job in jobs_of(task, 20, 1)] != [job.prompt for job in jobs_of(task, 20, 2)]


def test_seeds_of_turns_differ(task: Task) -> None:
    seeds = [turn_seed(job, turn) for job in jobs_of(task, 10, size=3) for turn in range(3)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 1 << 63


@pytest.mark.parametrize("sample", [Sample([], [], [], "end"), Sample([1, 2], [-1.0], [], "end")])
def test_a_sample_without_tokens_or_of_unequal_lengths_is_refused(sample: Sample) -> None:
    with pytest.raises(RemoteError):
        Play([1]).add_turn(sample)


@given(st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=4), min_size=1, max_size=8))
def test_a_replay_reads_back_the_parts_of_a_play(parts: list[list[int]]) -> None:
    play = Play([1, 2])
    for number, part in enumerate(parts):
        if number % 2:
            play.add_environment(part)
        else:
            play.add_turn(Sample(part, [-1.0] * len(part), [], "length"))
    found = play.end("length")
    replay = Replay(found.token_ids, found.mask)
    replay.environment([1, 2])
    for number, part in enumerate(parts):
        if number % 2:
            replay.environment(part)
        else:
            assert replay.turn(len(part)) == part
    replay.end()
