"""Held-out problems and demonstrations: no overlap, one split on every machine, and whole rewards."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_sampler import jobs_of

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.tasks.sums import END, Sums, encode, prompt_ids
from p2pcast.tasks.task import (
    Demonstrating,
    Demonstration,
    HoldingOut,
    Task,
    demonstrations_of,
    evaluation_jobs_of,
)
from p2pcast.tasks.task_loader import load_task

TASKS = (
    "sums,held_out=20",
    "recite,tokens=400,asked=2,held_out=20",
    "leduc,held_out=20",
    "holdem,tokenizer=bytes,held_out=20",
    "math,tokenizer=bytes,held_out=40",
)
PACKAGES = {"leduc": "pyspiel", "holdem": "pokerkit", "math": "math_verify"}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> Any:
    if package := PACKAGES.get(request.param.partition(",")[0]):
        pytest.importorskip(package, reason="needs the task's extra")
    return load_task(request.param)


@pytest.fixture
def leduc() -> Any:
    pytest.importorskip("pyspiel", reason="needs the extra leduc")
    return load_task("leduc,held_out=20")


def problems(task: Any, prompts: Any, count: int = 400) -> set[str]:
    return {task.problem(prompt.prompt) for prompt in islice(prompts, count)}


def addends(one: Demonstration) -> list[str]:
    text = Sums().text(one.token_ids[one.mask == 0].tolist())
    return text.removeprefix("<begin>").removesuffix("=").split("+")


# -- held-out problems


def test_training_and_evaluation_never_share_a_problem(task: Any) -> None:
    training = problems(task, task.jobs(0)) | problems(task, task.jobs(7))
    evaluation = problems(task, task.evaluation_jobs(0)) | problems(task, task.evaluation_jobs(7))
    assert training
    assert evaluation
    assert not training & evaluation


def test_the_share_is_kept(leduc: Any) -> None:
    for task in (Sums(held_out=20), leduc):
        held = [task.held_out(prompt.prompt) for prompt in islice(task.prompts(3), 2000)]
        assert 0.15 < np.mean(held) < 0.25


def test_a_problem_is_held_out_by_its_content() -> None:
    task = Sums(held_out=20)
    found = next(task.evaluation_jobs(0)).prompt
    left, right = found.split(b"+")
    assert all(task.held_out(prompt) for prompt in (found, right + b"+" + left, b"0" + found))
    assert Sums(digits=5, held_out=20).held_out(found)


def test_a_deal_is_held_out_in_both_seats(leduc: Any) -> None:
    asked = [json.loads(prompt.prompt) for prompt in islice(leduc.evaluation_jobs(4), 40)]
    assert [one["seat"] for one in asked] == [0, 1] * 20
    assert [one["deal"] for one in asked[::2]] == [one["deal"] for one in asked[1::2]]
    assert len({one["deal"] for one in asked}) == 20


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 99), st.integers(0, 99))
def test_a_larger_share_holds_out_the_problems_of_a_smaller_one(first: int, second: int, left: int, right: int) -> None:
    small, large = (Sums(held_out=share).held_out(f"{left}+{right}".encode()) for share in sorted((first, second)))
    assert large or not small


def test_every_process_divides_the_problems_alike() -> None:
    script = """
from itertools import islice
from p2pcast.tasks.sums import Sums
print(Sums(held_out=20).hash.hex(), *(p.prompt.decode() for p in islice(Sums(held_out=20).evaluation_jobs(1), 50)))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_the_split_stays() -> None:
    """A change would mix problems of old evaluations into the training of runs that resume."""
    prompts = (prompt.prompt.decode() for prompt in islice(Sums(held_out=10).evaluation_jobs(0), 4))
    assert list(prompts) == ["96+73", "65+7", "81+77", "37+52"]


def test_without_a_share_all_problems_are_trained_on() -> None:
    task = Sums()
    assert [p.prompt for p in islice(task.jobs(0), 50)] == [p.prompt for p in islice(task.prompts(0), 50)]
    with pytest.raises(UsageError, match="sums holds no problems out for evaluation: add held_out=10"):
        evaluation_jobs_of(task, 0)


def test_the_share_is_part_of_the_hash() -> None:
    assert Sums().hash == Sums(held_out=0).hash
    assert Sums().hash != Sums(held_out=10).hash != Sums(held_out=20).hash


def test_a_side_without_problems_is_an_error() -> None:
    task = Sums(digits=1, held_out=1)
    task.held_out_percent = -1
    with pytest.raises(UsageError, match="holds out none of its few problems"):
        next(task.evaluation_jobs(0))
    task.held_out_percent = 100
    with pytest.raises(UsageError, match="holds out all of its few problems"):
        next(task.jobs(0))


def test_a_prompt_of_another_task_belongs_to_neither_side(task: Any) -> None:
    with pytest.raises(RemoteError):
        task.held_out(b"?")


# -- demonstrations


def test_a_demonstrated_sum_gets_the_whole_reward() -> None:
    task = Sums(held_out=20)
    like = jobs_of(task, 1)[0]
    for one in islice(task.demonstrations(0), 100):
        job = dataclasses.replace(like, prompt="+".join(addends(one)).encode())
        assert task.reward(job, one.token_ids, one.mask) == 1.0
        assert not task.held_out(job.prompt)
        assert one.token_ids[one.mask == 0].tolist() == prompt_ids(job)
        assert one.token_ids[one.mask == 1].tolist() == [*encode(str(sum(map(int, addends(one))))), END]


def test_demonstrated_hands_are_legal_and_end_without_a_forfeit(leduc: Any) -> None:
    prompts = leduc.chosen(leduc.prompts("demonstrations", 5), held_out=False)
    like = jobs_of(leduc, 1)[0]
    said = set()
    for one, prompt in zip(islice(leduc.demonstrations(5), 200), prompts, strict=False):
        job = dataclasses.replace(like, prompt=prompt.prompt)
        hand = leduc.hand(job)
        hand.observe()
        for token in one.token_ids[one.mask == 1].tolist():
            assert token in hand.legal
            hand.act([token])
            said.add(token)
        assert hand.over
        assert not hand.forfeited
        assert leduc.reward(job, one.token_ids, one.mask) == hand.chips
    assert said == {3, 4, 5}


def test_a_demonstrating_player_draws_legal_actions_alike_often(leduc: Any) -> None:
    """In the first turn of a hand without a bet to meet, these are call and raise."""
    first = [int(one.token_ids[one.mask == 1][0]) for one in islice(leduc.demonstrations(0), 1000)
             if one.mask.tolist().index(1) == 4]  # fmt: skip
    assert len(first) > 300
    assert 0.42 < np.mean([token == 5 for token in first]) < 0.58


def test_equal_seeds_give_equal_demonstrations(leduc: Any) -> None:
    for task in (Sums(), leduc):
        first, again, other = (
            [(one.token_ids.tolist(), one.mask.tolist()) for one in islice(task.demonstrations(seed), 20)]
            for seed in (1, 1, 2)
        )
        assert first == again != other


def test_demonstrations_are_other_problems_than_the_first_prompts() -> None:
    """Learner and ledger often have the same seed."""
    task = Sums(digits=9)
    demonstrated = {tuple(addends(one)) for one in islice(task.demonstrations(0), 200)}
    asked = {tuple(prompt.prompt.decode().split("+")) for prompt in islice(task.jobs(0), 200)}
    assert not demonstrated & asked


# -- tasks without


def test_a_task_without_these_methods_is_refused() -> None:
    plain = load_task("netem.rollouts.long_answers:LongAnswers")
    assert not isinstance(plain, Demonstrating | HoldingOut)
    with pytest.raises(UsageError, match="task long-answers offers no demonstrations"):
        demonstrations_of(plain, 0)
    with pytest.raises(UsageError, match="task long-answers holds no problems out"):
        evaluation_jobs_of(plain, 0)


def test_built_in_tasks_offer_the_methods_of_the_guide(leduc: Any) -> None:
    found: list[Task] = [Sums(), leduc]
    assert all(isinstance(task, Demonstrating) and isinstance(task, HoldingOut) for task in found)
