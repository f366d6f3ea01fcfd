from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from scripted_sampler import ScriptedSampler, jobs_of

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.chat_tokens import byte_tokens
from p2pcast.tasks.task import ForgedPlayError
from p2pcast.tasks.task_process import TaskProcesses

pytest.importorskip("math_verify", reason="needs the extra math")

from p2pcast.tasks.math_task import BUILT_IN, Math

NAME = "math,tokenizer=bytes"
TASK = Math("bytes")
(END,) = TASK.stop_token_ids


def asked(question: str, answer: str) -> Job:
    prompt = json.dumps({"question": question, "answer": answer}).encode()
    return dataclasses.replace(jobs_of(TASK, 1)[0], prompt=prompt, max_tokens=200_000)


def said(text: str) -> list[int]:
    return [*text.encode(), END]


@pytest.mark.parametrize(("question", "answer"), BUILT_IN)
async def test_the_built_in_answers_get_the_whole_reward(question: str, answer: str) -> None:
    job = asked(question, answer)
    found = await TASK.play(ScriptedSampler([said(f"<think>So.</think>\\boxed{{{answer}}}")]), job)
    assert TASK.reward(job, found.token_ids, found.mask) == 1.0
    assert question in TASK.text(found.token_ids.tolist())


async def test_tokens_after_a_stop_token_are_no_play() -> None:
    job = asked("1+1?", "2")
    found = await TASK.play(ScriptedSampler([[*said("\\boxed{3}"), *said("\\boxed{2}")]]), job)
    with pytest.raises(ForgedPlayError):
        TASK.reward(job, found.token_ids, found.mask)


def test_every_pass_holds_each_question_once_in_its_own_order(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(20)))
    task = Math("bytes", questions=str(file))
    drawn = [json.loads(prompt.prompt)["question"] for prompt in islice(task.jobs(3), 40)]
    assert sorted(drawn[:20]) == sorted(drawn[20:]) == sorted(f"q{i}" for i in range(20))
    assert drawn[:20] != drawn[20:]
    assert drawn == [json.loads(prompt.prompt)["question"] for prompt in islice(task.jobs(3), 40)]


def test_the_hash_covers_the_tokens_and_not_the_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    assert Math("bytes", questions=str(tmp_path / "q.jsonl")).hash == TASK.hash
    changed = dataclasses.replace(byte_tokens(), digest=bytes(32))
    monkeypatch.setattr("p2pcast.tasks.text_task.chat_tokens", lambda _: changed)
    assert Math("any").hash != TASK.hash


def test_a_setting_out_of_bounds_is_refused() -> None:
    with pytest.raises(LocalError, match="max_tokens=0"):
        Math("bytes", max_tokens=0)
    with pytest.raises(LocalError, match="no such file"):
        Math("bytes", questions="/nowhere")


@pytest.mark.parametrize("prompt", [b"", b"[]", b'{"question": 1, "answer": "2"}', b'{"question": "1"}', b"[" * 99_999])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    job = dataclasses.replace(jobs_of(TASK, 1)[0], prompt=prompt)
    with pytest.raises(RemoteError):
        TASK.reward(job, np.zeros(0, "<u4"), np.zeros(0, "u1"))


# -- in real processes


@pytest.fixture
async def checks() -> AsyncIterator[TaskProcesses]:
    found = TaskProcesses(NAME, TASK.hash, check_s=60, memory_bytes=limits.GIB)
    yield found
    await found.close()


async def checked(checks: TaskProcesses, answer: str) -> float:
    job = asked("1+1?", "2")
    found = await TASK.play(ScriptedSampler([said(answer)]), job)
    return await checks.reward(job, found.token_ids, found.mask)


@pytest.mark.parametrize(
    "answer",
    [
        "(x+y+z)^{16}(x+2y+3z)^{16}(x+y-z)^{16}",
        "\\frac{1}{(x+1)^{16}}+\\frac{1}{(x+2)^{16}}+\\frac{1}{(x+y+3)^{16}}",
    ],
)
async def test_a_comparison_that_hangs_is_ended_and_gives_nothing(checks: TaskProcesses, answer: str) -> None:
    await checked(checks, "\\boxed{2}")
    [checker] = checks._idle
    assert await checked(checks, f"\\boxed{{{answer}}}") == 0.0
    assert checks._idle == [checker]
    assert await checked(checks, "\\boxed{2}") == 0.9


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
        "\\boxed{" * 20_000,
        "\\boxed{" + "1" * 150_000 + "}",
        "\\boxed{" + "\\sqrt{" * 10_000 + "2" + "}" * 10_001,
    ],
)
async def test_hostile_answers_are_checked_without_a_new_process(checks: TaskProcesses, answer: str) -> None:
    assert await checked(checks, answer) <= 0.2
    assert checks.failed == 0
