"""A task whose rewards differ within a group, whatever model plays it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask

NAME = "tests.daemons.rollouts.parity_task:Parity"


class Parity(HashedTask):
    """Reward 1 if the sum of the sampled tokens is odd."""

    name, vocabulary, stop_token_ids = "parity", 16, (2,)

    def jobs(self, seed: int) -> Iterator[Prompt]:
        number = seed
        while True:
            yield Prompt(bytes([3 + number % 10, 3 + number // 10 % 10]), max_tokens=8)
            number += 1

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(job.prompt)
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        replay = Replay(token_ids, mask)
        replay.environment(list(job.prompt))
        said = replay.turn(job.max_tokens)
        replay.end()
        return float(sum(said) % 2)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(list(token_ids))
