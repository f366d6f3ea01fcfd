"""The parity task, of which one prompt in four ends or blocks the process of its play."""

from __future__ import annotations

import os
import time

from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import Sampler, Trajectory
from tests.daemons.rollouts.parity_task import Parity

NAME = "tests.daemons.rollouts.blocking_task:Blocking"


class Blocking(Parity):
    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        played = await super().play(sampler, job)
        if job.prompt[0] == 3:
            time.sleep(1e6)  # noqa: ASYNC251 - the fault
        if job.prompt[0] % 4 == 0:
            os._exit(1)
        return played
