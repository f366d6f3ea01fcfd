from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from scripted_sampler import ScriptedSampler, jobs_of

from p2pcast.errors import RemoteError, UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import ForgedPlayError
from p2pcast.tasks.trial_tasks.recall import BEGIN, END, FIRST_KEY, FIRST_VALUE, VALUES, VOCABULARY, Recall

TASK = Recall(tokens=600, asked=4, spacing=8)


async def rewarded(job: Job, answer: list[int]) -> float:
    found = await TASK.play(ScriptedSampler([answer]), job)
    return TASK.reward(job, found.token_ids, found.mask)


def right_answer(job: Job) -> list[int]:
    """From the prompt's tokens alone."""
    tokens = TASK.drawn(job.prompt).prompt.tolist()
    text, asked = tokens[: -TASK.asked - 2], tokens[-TASK.asked - 1 : -1]
    said = []
    for key in asked:
        values = Counter(after for before, after in pairwise(text) if before == key)
        assert values.total() == TASK.statements
        said += [key, values.most_common(1)[0][0]]
    return [*said, END]


async def test_the_reward_is_the_share_of_right_values() -> None:
    for job in jobs_of(TASK, 20):
        answer = right_answer(job)
        assert await rewarded(job, answer) == 1.0
        wrong = answer.copy()
        wrong[3] = FIRST_VALUE + (wrong[3] - FIRST_VALUE + 1) % VALUES
        assert await rewarded(job, wrong) == 0.75
        assert await rewarded(job, answer[:4]) == 0.5
        assert await rewarded(job, [END]) == 0.0
        # Values without their keys are not right.
        assert await rewarded(job, [*answer[1:-1], END]) == 0.0


async def test_a_text_of_another_prompt_is_refused() -> None:
    job = jobs_of(TASK, 1)[0]
    found = await TASK.play(ScriptedSampler([right_answer(job)]), job)
    token_ids = found.token_ids.copy()
    token_ids[5] += 1
    with pytest.raises(ForgedPlayError):
        TASK.reward(job, token_ids, found.mask)


@pytest.mark.parametrize(("tokens", "asked"), [(600, 4), (2048, 16), (6144, 64)])
def test_prompts_have_the_tokens_of_the_setting(tokens: int, asked: int) -> None:
    task = Recall(tokens=tokens, asked=asked, spacing=8)
    for job in jobs_of(task, 5):
        prompt = task.drawn(job.prompt).prompt
        assert len(prompt) == tokens
        assert prompt[0] == BEGIN
        assert prompt.max() < VOCABULARY
        assert job.max_tokens == 2 * asked + 1


def test_asked_keys_are_stated_all_over_the_text() -> None:
    places = [place for job in jobs_of(Recall(), 50) for row in Recall().drawn(job.prompt).places for place in row]
    counts, _ = np.histogram(places, bins=8, range=(0, 2048))
    assert counts.min() > 0.7 * counts.max()


def test_demonstrations_get_the_whole_reward_and_are_not_held_out() -> None:
    task = Recall(tokens=600, asked=4, spacing=8, held_out=20)
    prompts = task.chosen(task.prompts("demonstrations", 3), held_out=False)
    like = jobs_of(task, 1)[0]
    for one, prompt in zip(islice(task.demonstrations(3), 20), prompts, strict=False):
        assert task.reward(dataclasses.replace(like, prompt=prompt.prompt), one.token_ids, one.mask) == 1.0
        assert not task.held_out(prompt.prompt)


def test_prompts_stay() -> None:
    """A change would give other rewards to rollouts of old ledgers."""
    prompt = TASK.drawn(b"0123456789abcdef").prompt.tolist()
    assert TASK.text([*prompt[:12], *prompt[-6:]]) == (
        "<begin> w11 w51 k131 v53 w19 w52 w49 w12 w48 w39 w16 <ask> k6 k158 k234 k131 <answer>"
    )


@pytest.mark.parametrize("prompt", [b"", b"12", b"0123456789ABCDEF", b"0123456789abcdef\n"])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    with pytest.raises(RemoteError):
        TASK.drawn(prompt)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "tokens=0 of task recall is out of range"),
        ({"asked": 0}, "asked=0 of task recall is out of range"),
        ({"spacing": 1}, "spacing=1 of task recall is out of range"),
        ({"statements": 0}, "statements=0 of task recall is out of range"),
        ({"tokens": 100, "asked": 4}, "states 1 keys, and 4 to 256 are needed"),
        ({"tokens": 8192, "spacing": 2}, "states 1362 keys, and 16 to 256 are needed"),
        ({"held_out": 60}, "held_out=60 of task recall"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recall(**settings)


def test_settings_are_part_of_the_hash() -> None:
    assert len({Recall().hash, Recall(tokens=4096).hash, Recall(asked=8).hash, Recall(statements=1).hash}) == 4


def test_keys_and_values_are_tokens_of_their_own() -> None:
    assert Recall().text([BEGIN, FIRST_KEY + 3, FIRST_VALUE + 2, 9, 6]) == "<begin> k3 v2 w1 <6>"
