"""A task for measurements of a whole run. All answers are equally long. Rewards differ within a group whatever model
plays, so the ledger drops no group of an untrained model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

import numpy as np

from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask, Settings

NAME: Final = "netem.rollouts.graded_answers:GradedAnswers"
VOCABULARY: Final = 256
"""A token of a prompt is a byte of its record."""
PROMPT_TOKENS: Final = 8
MOST_TOKENS: Final = 448


class GradedAnswers(HashedTask):
    """The reward is the last token ÷ the vocabulary. ``tokens``: of each answer."""

    name, vocabulary, stop_token_ids = "graded-answers", VOCABULARY, ()

    def __init__(self, tokens: int = 64) -> None:
        if not 1 <= tokens <= MOST_TOKENS:
            raise UsageError(f"tokens={tokens} of task {self.name}: give 1 to {MOST_TOKENS}")
        self.tokens = tokens

    @property
    def settings(self) -> Settings:
        return {"tokens": self.tokens}

    def jobs(self, seed: int) -> Iterator[Prompt]:
        for number in count():
            drawn = (draw_below(VOCABULARY, self.name, seed, number, place) for place in range(PROMPT_TOKENS))
            yield Prompt(bytes(drawn), max_tokens=self.tokens)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(job.prompt)
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return float(token_ids[-1]) / VOCABULARY

    def text(self, token_ids: Sequence[int]) -> str:
        return str(list(token_ids))
