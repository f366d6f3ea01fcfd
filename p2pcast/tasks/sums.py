"""Task ``sums``: additions, digit by digit, with a vocabulary of its own; the smallest task that a model can learn.

A prompt is ``<begin>12+34=``, one token a character. The reward is 1 for the sum's digits and ``<end>``, and otherwise
0. Swaps of this task for another change configuration alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from p2pcast.errors import RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask, Settings

PAD, BEGIN, END = 0, 1, 2
CHARACTERS: Final = "0123456789+="
FIRST_CHARACTER: Final = 3
SPECIAL: Final = ("<pad>", "<begin>", "<end>")
VOCABULARY: Final = 16
"""Number of token ids; the last one is unused, so that the number is a power of two."""
_PROMPT: Final = re.compile(rb"\d{1,18}\+\d{1,18}", re.ASCII)


def encode(text: str) -> list[int]:
    return [FIRST_CHARACTER + CHARACTERS.index(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    names = [*SPECIAL, *CHARACTERS, "<unused>"]
    return "".join(names[token] if token < len(names) else f"<{token}>" for token in token_ids)


class Sums(HashedTask):
    """``digits``: most digits of an addend."""

    name = "sums"
    vocabulary = VOCABULARY
    stop_token_ids = (END,)

    def __init__(self, digits: int = 2) -> None:
        self.digits = digits

    @property
    def settings(self) -> Settings:
        return {"digits": self.digits}

    def jobs(self, seed: int) -> Iterator[Prompt]:
        number = 0
        while True:
            left, right = (draw_below(10**self.digits, "sums", seed, number, side) for side in (0, 1))
            yield Prompt(f"{left}+{right}".encode(), self.digits + 2)
            number += 1

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(prompt_ids(job))
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        replay = Replay(token_ids, mask)
        replay.environment(prompt_ids(job))
        said = replay.turn(job.max_tokens)
        replay.end()
        return float(said == [*encode(str(_sum(job))), END])

    def text(self, token_ids: Sequence[int]) -> str:
        return decode(token_ids)


def prompt_ids(job: Job) -> list[int]:
    """Raises RemoteError for a job of another task."""
    if not _PROMPT.fullmatch(job.prompt):
        raise RemoteError("the job's prompt is no addition")
    return [BEGIN, *encode(job.prompt.decode() + "=")]


def _sum(job: Job) -> int:
    left, right = job.prompt.split(b"+")
    return int(left) + int(right)
