"""Odd results before the checker, and plays that leave something behind."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_sampler import jobs_of

from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.sums import END, Sums, encode
from p2pcast.tasks.task import ForgedPlayError, Sampler, Trajectory
from p2pcast.tasks.task_checker import CheckLoop, answer_of

TASK = Sums(1)
JOB = dataclasses.replace(jobs_of(TASK, 1)[0], prompt=b"1+2", max_tokens=4)
ASKED = [1, *encode("1+2=")]
THREE = encode("3")[0]


class Rounds(Sums):
    """Sums in rounds: the task says BEGIN between turns of two tokens, and a stop token ends the play."""

    name = "rounds"

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play([1])
        while True:
            sample = await play.turn(sampler, job, 2, self.stop_token_ids)
            if sample.stop == "end" or play.sampled == job.max_tokens:
                return play.end(sample.stop)
            play.add_environment([1])

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        replay, left = Replay(token_ids, mask), job.max_tokens
        said = [0]
        while left and said[-1] not in self.stop_token_ids:
            replay.environment([1])
            said = replay.turn(min(2, left), self.stop_token_ids)
            left -= len(said)
        replay.end()
        return 1.0


@pytest.fixture(scope="module")
def loop() -> Iterator[CheckLoop]:
    with CheckLoop() as found:
        yield found


def asked(loop: CheckLoop, task: Sums, token_ids: list[int], mask: list[int], *said: Any) -> list[Any]:
    ids, marks = np.array(token_ids, "<u4").tobytes(), np.array(mask, "u1").tobytes()
    return answer_of(task, [JOB.to_bytes(), ids, marks, said or None], loop)


def turns(*at: int) -> bytes:
    return np.array(at, "<u4").tobytes()


@pytest.mark.parametrize(
    ("token_ids", "mask", "stop", "begins", "answer"),
    [
        ([*ASKED, THREE, END], [0] * 5 + [1, 1], "end", turns(5), "reward"),
        ([*ASKED, THREE, THREE, THREE, END], [0] * 5 + [1] * 4, "end", turns(5), "reward"),
        ([*ASKED, THREE, THREE, THREE, THREE], [0] * 5 + [1] * 4, "length", turns(5), "reward"),
        ([], [], "end", turns(), "forged"),
        (ASKED, [0] * 5, "end", turns(), "forged"),
        ([*ASKED, THREE, END], [0] * 7, "end", turns(), "forged"),
        ([*ASKED, THREE, END], [0] * 7, "end", turns(5), "forged"),
        ([*ASKED, THREE, END], [1] * 7, "end", turns(0), "forged"),
        ([*ASKED, THREE, END], [0] * 5 + [1, 0], "end", turns(5), "forged"),
        ([*ASKED, THREE, END], [0] * 5 + [0, 1], "end", turns(6), "forged"),
        ([*ASKED, THREE, END, THREE], [0] * 5 + [1, 1, 1], "end", turns(5), "forged"),
        ([*ASKED, END, THREE, END], [0] * 5 + [1, 1, 1], "end", turns(5), "forged"),
        ([*ASKED, THREE, END, THREE], [0] * 5 + [1, 1, 0], "end", turns(5), "forged"),
        ([*ASKED, THREE, END], [0] * 5 + [2, 2], "end", turns(5), "forged"),
        ([*ASKED, *[THREE] * 5], [0] * 5 + [1] * 5, "length", turns(5), "forged"),
        ([*ASKED, THREE, END], [0] * 5 + [1], "end", turns(5), "forged"),
    ],
    ids=[
        "right", "stop-at-the-limit", "limit", "no-token", "prompt-alone", "mask-all-false", "mask-false-with-turns",
        "mask-all-true", "stop-not-sampled", "answer-not-sampled", "stop-in-the-middle", "stop-first",
        "token-of-the-task-after-the-end", "mask-of-two", "beyond-the-limit", "short-mask",
    ],
)  # fmt: skip
def test_odd_results_are_refused(
    loop: CheckLoop, token_ids: list[int], mask: list[int], stop: str, begins: bytes, answer: str
) -> None:
    assert asked(loop, TASK, token_ids, mask, stop, begins, None)[0] == answer


@pytest.mark.parametrize(
    ("token_ids", "mask", "stop", "begins", "answer"),
    [
        ([1, 5, 6, 1, 7, 8], [0, 1, 1, 0, 1, 1], "length", turns(1, 4), "reward"),
        ([1, 5, 6, 1, 7, END], [0, 1, 1, 0, 1, 1], "end", turns(1, 4), "reward"),
        ([1, 5, 6, 1, END], [0, 1, 1, 0, 1], "end", turns(1, 4), "reward"),
        ([1, 5, 6, 1, 7, 8], [0, 1, 1, 0, 1, 1], "length", turns(1), "forged"),
        ([1, 5, 6, 1, 7, 8], [0, 1, 1, 0, 1, 1], "length", turns(1, 3), "forged"),
        ([1, 5, 6, 1, 7, 8], [0, 1, 1, 0, 1, 1], "task", turns(1, 4), "forged"),
        ([1, 5, 6, 1], [0, 1, 1, 0], "length", turns(1), "forged"),
        ([1, 5, 1, 7, 8], [0, 1, 0, 1, 1], "length", turns(1, 3), "forged"),
        ([1, 5, 6, 7, 8], [0, 1, 1, 1, 1], "length", turns(1), "forged"),
        ([1, 5, END, 1, 7, 8], [0, 1, 1, 0, 1, 1], "length", turns(1, 4), "forged"),
        ([1, 5, 6, 9, 7, 8], [0, 1, 1, 0, 1, 1], "length", turns(1, 4), "forged"),
    ],
    ids=[
        "two-turns", "stop-at-the-end", "short-last-turn", "turn-missing", "turn-elsewhere", "other-stop",
        "last-turn-missing", "short-turn", "nothing-between", "stop-in-the-middle", "another-token-of-the-task",
    ],
)  # fmt: skip
def test_turns_must_equal_the_turns_of_the_play(
    loop: CheckLoop, token_ids: list[int], mask: list[int], stop: str, begins: bytes, answer: str
) -> None:
    assert asked(loop, Rounds(1), token_ids, mask, stop, begins, None)[0] == answer


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=12),
    st.integers(1, 14),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_a_turn_ends_as_token_by_token_reading_says(play: list[tuple[int, int]], most: int, stops: list[int]) -> None:
    expected: list[int] = []
    for token, value in play:
        if value != 1 or len(expected) == most or (expected and expected[-1] in stops):
            break
        expected.append(token)
    replay = Replay(np.array([t for t, _ in play], "<u4"), np.array([m for _, m in play], "u1"))
    if expected:
        assert replay.turn(most, stops) == expected
        assert replay.finished == (len(expected) == len(play))
    else:
        with pytest.raises(ForgedPlayError):
            replay.turn(most, stops)


class Seen(Sums):
    """Has ``look`` called within its play."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__(1)
        self._look = look

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        self._look()
        await asyncio.sleep(0)
        return await super().play(sampler, job)


RIGHT = ([*ASKED, THREE, END], [0] * 5 + [1, 1], "end", turns(5), None)


def test_a_play_leaves_no_task_for_the_next_check(loop: CheckLoop) -> None:
    left: list[asyncio.Task[None]] = []

    def start() -> None:
        assert not [task for task in left if not task.cancelled()]
        left.append(asyncio.get_running_loop().create_task(asyncio.sleep(3600)))

    for _ in range(2):
        assert asked(loop, Seen(start), *RIGHT)[0] == "reward"
    assert [task.cancelled() for task in left] == [True, True]


def test_a_play_sees_no_variable_of_the_last_play(loop: CheckLoop) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    seen: list[int] = []

    def look() -> None:
        seen.append(variable.get())
        variable.set(1)

    for _ in range(2):
        assert asked(loop, Seen(look), *RIGHT)[0] == "reward"
    assert seen == [0, 0]


def test_plays_run_in_one_loop_and_leave_signals_alone(loop: CheckLoop) -> None:
    """A handler of SIGINT for each play had Python write the whole play as text."""
    before, seen = signal.getsignal(signal.SIGINT), []
    for _ in range(2):
        look = Seen(lambda: seen.append((asyncio.get_running_loop(), signal.getsignal(signal.SIGINT))))
        assert asked(loop, look, *RIGHT)[0] == "reward"
    assert seen[0] == seen[1]
    assert seen[0][1] is before
