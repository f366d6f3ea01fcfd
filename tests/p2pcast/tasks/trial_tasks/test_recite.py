from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest
from scripted_sampler import ScriptedSampler, jobs_of

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import ForgedPlayError
from p2pcast.tasks.trial_tasks.recite import BEGIN, FIRST_BODY, FIRST_STARTER, PHRASE, VOCABULARY, Recite

TASK = Recite(tokens=600, asked=4)


async def rewarded(job: Job, answer: list[int]) -> float:
    found = await TASK.play(ScriptedSampler([answer]), job)
    return TASK.reward(job, found.token_ids, found.mask)


def right_answer(job: Job) -> list[int]:
    """From the prompt's tokens alone: the starters of the text, each followed as at its first place."""
    tokens = TASK.drawn(job.prompt).prompt.tolist()
    after = dict(reversed(list(pairwise(tokens))))
    starters = sorted({token for token in tokens if FIRST_STARTER <= token < FIRST_BODY})
    said = []
    for starter in starters[: TASK.asked]:
        said.append(starter)
        while len(said) % PHRASE:
            said.append(after[said[-1]])
    return said


async def test_the_reward_is_the_share_of_phrases_of_the_text() -> None:
    for job in jobs_of(TASK, 20):
        answer = right_answer(job)
        assert await rewarded(job, answer) == 1.0
        wrong = answer.copy()
        wrong[PHRASE + 3] = wrong[PHRASE + 2]
        assert await rewarded(job, wrong) == 0.75
        assert await rewarded(job, answer[: 2 * PHRASE]) == 0.5
        assert await rewarded(job, [BEGIN]) == 0.0
        # Phrases count at their places alone.
        assert await rewarded(job, [*answer[1:], answer[0]]) == 0.0


async def test_a_text_of_another_prompt_is_refused() -> None:
    job = jobs_of(TASK, 1)[0]
    found = await TASK.play(ScriptedSampler([right_answer(job)]), job)
    token_ids = found.token_ids.copy()
    token_ids[5] = BEGIN
    with pytest.raises(ForgedPlayError):
        TASK.reward(job, token_ids, found.mask)


@pytest.mark.parametrize(("tokens", "asked"), [(66, 4), (600, 4), (2048, 16), (6145, 64)])
def test_prompts_have_the_tokens_of_the_setting(tokens: int, asked: int) -> None:
    task = Recite(tokens=tokens, asked=asked)
    for job in jobs_of(task, 5):
        prompt = task.drawn(job.prompt).prompt
        assert len(prompt) == tokens
        assert prompt[0] == BEGIN
        assert prompt.max() < VOCABULARY
        assert job.max_tokens == PHRASE * asked


def test_phrases_stand_all_over_the_text_with_two_followers_each() -> None:
    halves, counts, usual = np.zeros(2), Counter[int](), 0
    for job in jobs_of(Recite(), 20):
        prompt = Recite().drawn(job.prompt).prompt
        starters = prompt[(prompt >= FIRST_STARTER) & (prompt < FIRST_BODY)].tolist()
        counts.update(Counter(starters).values())
        firsts = np.unique(prompt, return_index=True)[1]
        halves += np.histogram(firsts, bins=2, range=(0, 2048))[0]
        followers = Counter(pairwise(starters))
        for starter in set(starters):
            both = sorted(count for (first, _), count in followers.items() if first == starter)
            assert len(both) <= 2
            usual += both[-1] if both else 0
    stood = sum(count * times for count, times in counts.items())
    assert 3.5 < stood / sum(counts.values()) < 5
    assert 0.7 < usual / stood < 0.9
    # A phrase with four places in the text stands in the first half with 15 of 16.
    assert 0.03 < halves[1] / halves.sum() < 0.15


def test_demonstrations_get_the_whole_reward_and_are_not_held_out() -> None:
    task = Recite(tokens=600, asked=4, held_out=20)
    prompts = task.chosen(task.prompts("demonstrations", 3), held_out=False)
    like = jobs_of(task, 1)[0]
    for one, prompt in zip(islice(task.demonstrations(3), 20), prompts, strict=False):
        assert task.reward(dataclasses.replace(like, prompt=prompt.prompt), one.token_ids, one.mask) == 1.0
        assert not task.held_out(prompt.prompt)


def test_prompts_stay() -> None:
    """A change would give other rewards to rollouts of old ledgers."""
    prompt = TASK.drawn(b"0123456789abcdef").prompt.tolist()
    assert TASK.text([*prompt[:12], *prompt[-6:]]) == (
        "<begin> b222 b108 b188 b9 b325 b85 b298 s25 b312 b290 b310 b424 b343 b126 b218 b62 b385"
    )


@pytest.mark.parametrize("prompt", [b"", b"12", b"0123456789ABCDEF", b"0123456789abcdef\n"])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    with pytest.raises(RemoteError):
        TASK.drawn(prompt)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 8}, "tokens=8 of task recite is out of range"),
        ({"asked": 0}, "asked=0 of task recite is out of range"),
        ({"phrases": 65}, "phrases=65 of task recite is out of range"),
        ({"repeats": 0}, "repeats=0 of task recite is out of range"),
        ({"tokens": 32}, "tokens=32 of task recite has no room for a phrase 4 times"),
        ({"held_out": 60}, "held_out=60 of task recite"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recite(**settings)


def test_settings_are_part_of_the_hash() -> None:
    others = {Recite(tokens=4096).hash, Recite(asked=4).hash, Recite(phrases=32).hash, Recite(repeats=2).hash}
    assert len({Recite().hash, *others}) == 5


def test_starters_and_bodies_are_tokens_of_their_own() -> None:
    assert Recite().text([BEGIN, FIRST_STARTER + 3, FIRST_BODY + 2, 6]) == "<begin> s3 b2 <6>"
