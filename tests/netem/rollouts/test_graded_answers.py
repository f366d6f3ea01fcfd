"""The task of whole runs in the lab: answers of one length, and rewards by the last token."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from netem.rollouts.graded_answers import NAME, PROMPT_TOKENS, VOCABULARY, GradedAnswers
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, job_of
from p2pcast.tasks.task_loader import load_task


def test_prompts_follow_the_seed_and_settings_change_the_hash() -> None:
    task = load_task(f"{NAME},tokens=5")
    assert isinstance(task, GradedAnswers)
    first, again, other = (list(islice(task.jobs(seed), 3)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(len(prompt.prompt) == PROMPT_TOKENS and prompt.max_tokens == 5 for prompt in first)
    assert task.hash != GradedAnswers(6).hash


@pytest.mark.parametrize("tokens", [0, 449])
def test_lengths_beyond_the_model_are_refused(tokens: int) -> None:
    with pytest.raises(UsageError, match="tokens"):
        GradedAnswers(tokens)


def test_the_reward_is_the_last_token() -> None:
    task = GradedAnswers(2)
    group = Group(
        id=bytes(16), size=2, purpose="train", task=task.name, task_hash=task.hash, prompt=b"\x01", seed=0,
        temperature=1.0, max_tokens=2,
    )  # fmt: skip
    job = job_of(group, 0, bytes(16), Version(0, 0))
    mask = np.array([0, 1, 1], "u1")
    rewards = [task.reward(job, np.array([1, 200, last], "<u4"), mask) for last in (0, 64, 255)]
    assert rewards == [0.0, 64 / VOCABULARY, 255 / VOCABULARY]
