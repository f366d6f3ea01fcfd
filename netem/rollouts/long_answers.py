"""A task for measurements of the ledger: plays of a fixed number of tokens, with a reward that costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask

NAME = "netem.rollouts.long_answers:LongAnswers"
TOKENS = 1024


class LongAnswers(HashedTask):
    name, vocabulary, stop_token_ids = "long-answers", 1 << 17, ()

    def jobs(self, seed: int) -> Iterator[Prompt]:
        while True:
            yield Prompt(b"\x01", max_tokens=TOKENS)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(job.prompt)
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return float(token_ids[-1] % 2)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(list(token_ids))
