"""Task ``sums``: additions, digit by digit, with a vocabulary of its own; the smallest task that a model can learn.

A prompt is ``<begin>12+34=``, one token a character. The reward is 1 for the sum's digits and ``<end>``, and otherwise
0. Swaps of this task for another change configuration alone. A demonstration is a prompt with the right answer. A
held-out problem is an unordered pair of addends, so that 34+12 is held out with 12+34.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

import numpy as np

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.held_out import HoldsOut
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Demonstration, Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask, Settings

PAD, BEGIN, END = 0, 1, 2
CHARACTERS: Final = "0123456789+="
FIRST_CHARACTER: Final = 3
SPECIAL: Final = ("<pad>", "<begin>", "<end>")
VOCABULARY: Final = 16
"""Number of token ids; the last one is unused, so that the number is a power of two."""
MAX_DIGITS: Final = 18
_PROMPT: Final = re.compile(rb"\d{1,%d}\+\d{1,%d}" % (MAX_DIGITS, MAX_DIGITS), re.ASCII)


def encode(text: str) -> list[int]:
    return [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    names = [*SPECIAL, *CHARACTERS, "<unused>"]
    return "".join(names[token] if token < len(names) else f"<{token}>" for token in token_ids)


class Sums(HashedTask, HoldsOut):
    """``digits``: most digits of an addend. ``held_out``: share of the problems excluded from training, in percent."""

    name = "sums"
    vocabulary = VOCABULARY
    stop_token_ids = (END,)

    def __init__(self, digits: int = 2, held_out: int = 0) -> None:
        if not 1 <= digits <= MAX_DIGITS:
            raise UsageError(f"digits={digits} of task sums: give 1 to {MAX_DIGITS}")
        self.digits = digits
        self.hold_out(held_out)

    @property
    def settings(self) -> Settings:
        return {"digits": self.digits, **self.held_out_settings}

    def prompts(self, *seed: int | str) -> Iterator[Prompt]:
        for number in count():
            left, right = (draw_below(10**self.digits, "sums", *seed, number, side) for side in (0, 1))
            yield Prompt(f"{left}+{right}".encode(), self.digits + 2)

    def problem(self, prompt: bytes) -> str:
        return "{}+{}".format(*sorted(_addends(prompt)))

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        for prompt in self.chosen(self.prompts("demonstrations", seed), held_out=False):
            asked, answer = _asked(prompt.prompt), _answer(prompt.prompt)
            mask = np.repeat(np.array([0, 1], "u1"), [len(asked), len(answer)])
            yield Demonstration(np.array([*asked, *answer], "<u4"), mask)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(prompt_ids(job))
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        replay = Replay(token_ids, mask)
        replay.environment(prompt_ids(job))
        said = replay.turn(job.max_tokens)
        replay.end()
        return float(said == _answer(job.prompt))

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)


def prompt_ids(job: Job) -> list[int]:
    """Raises RemoteError for a job of another task."""
    return _asked(job.prompt)


def _asked(prompt: bytes) -> list[int]:
    _addends(prompt)
    return [BEGIN, *encode(prompt.decode() + "=")]


def _answer(prompt: bytes) -> list[int]:
    return [*encode(str(sum(_addends(prompt)))), END]


def _addends(prompt: bytes) -> tuple[int, int]:
    if not _PROMPT.fullmatch(prompt):
        raise RemoteError("the job's prompt is no addition")
    left, right = prompt.split(b"+")
    return int(left), int(right)
