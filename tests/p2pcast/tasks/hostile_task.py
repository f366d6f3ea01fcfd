"""A task whose check does what the job's prompt says."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import ForgedPlayError, Prompt, Sampler, Trajectory
from p2pcast.tasks.task_checker import TOGETHER_S
from p2pcast.tasks.task_hash import HashedTask


class Hostile(HashedTask):
    name = "hostile"
    vocabulary = 4
    stop_token_ids = ()

    def jobs(self, seed: int) -> Iterator[Prompt]:
        while True:
            yield Prompt(b"good", 1)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        raise AssertionError("its rewards alone are tried")

    def text(self, token_ids: Sequence[int]) -> str:
        return str(token_ids)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        what, _, rest = job.prompt.decode().partition(" ")
        print("noise on stdout")
        match what:
            case "hang":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
                Path(rest).write_text(str(child.pid))
                time.sleep(600)
            case "spin":
                while True:
                    pass
            case "endless":
                collections.deque(itertools.repeat(None), maxlen=0)
            case "slow":
                time.sleep(2 * TOGETHER_S)
            case "crash":
                os._exit(3)
            case "memory":
                return float(len(bytearray(1 << 34)))
            case "raise":
                raise ZeroDivisionError("oops")
            case "nan":
                return float("nan")
            case "forged":
                raise ForgedPlayError("not mine")
            case "environment":
                return float(rest in os.environ)
            case "nonsense":
                for descriptor in range(3, 64):
                    with contextlib.suppress(OSError):
                        os.write(descriptor, b"\xff" * 64)
        return float(token_ids.sum() + mask.sum())


class InTime(Hostile):
    check_cpu_s = 0.5
