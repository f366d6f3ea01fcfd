"""The parity task, as if its rewards took long to compute, and a worker's copy of it that lies."""

from __future__ import annotations

import numpy as np

from p2pcast.rollouts.job import Job
from tests.daemons.rollouts.parity_task import Parity

NAME = "tests.daemons.rollouts.costly_task:Costly"


class Costly(Parity):
    trusted_reward = "costly"


class Lying(Costly):
    """Has the hash of the honest task."""

    @property
    def hash(self) -> bytes:
        return Costly().hash

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return super().reward(job, token_ids, mask) + 1.0
