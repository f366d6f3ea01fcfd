"""A task of two turns, whose play does between them what the job's prompt says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask

FOREVER_S = 1e6


def block() -> None:
    time.sleep(FOREVER_S)


def catastrophe() -> object:
    """A match that takes longer than any run, and never lets another thread work."""
    return re.match(r"(a+)+$", "a" * 64 + "b")


class HostilePlays(HashedTask):
    name = "hostile_plays"
    vocabulary = 16
    stop_token_ids = ()

    def __init__(self) -> None:
        self.held: list[Any] = []

    def jobs(self, seed: int) -> Iterator[Prompt]:
        while True:
            yield Prompt(b"good", 4)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play((1, 2, 3))
        await play.turn(sampler, job, 2, ())
        await self._misbehave(sampler, *job.prompt.decode().partition(" ")[::2])
        play.add_environment((4, 5))
        await play.turn(sampler, job, 2, ())
        played = play.end("length")
        match job.prompt:
            case b"forge tokens":
                return dataclasses.replace(played, token_ids=(played.token_ids + 1) % 16)
            case b"forge answer":
                last = np.append(played.token_ids[:-1], (played.token_ids[-1:] + 1) % 16)
                return dataclasses.replace(played, token_ids=last)
            case b"forge turns":
                return dataclasses.replace(played, turns=played.turns[:1])
            case b"forge mask":
                return dataclasses.replace(played, mask=np.ones_like(played.mask))
            case b"forge logprobs":
                return dataclasses.replace(played, logprobs=0 * played.logprobs, spans=())
            case b"long":
                return dataclasses.replace(played, token_ids=np.zeros(1 << 22, "<u4"))
        return played

    async def _misbehave(self, sampler: Sampler, what: str, rest: str) -> None:
        match what:
            case "sleep":
                block()
            case "slow":
                time.sleep(float(rest))  # noqa: ASYNC251 - the fault
            case "regex":
                catastrophe()
            case "thread":
                await asyncio.to_thread(catastrophe)
            case "exit":
                os._exit(3)
            case "leave":
                raise SystemExit(3)
            case "subtask":
                await asyncio.create_task(self._leave())
            case "raise":
                raise ZeroDivisionError("oops")
            case "unsendable":
                raise ValueError("\ud800")
            case "memory":
                while True:
                    self.held.append(bytearray(1 << 26))
            case "fork":
                if os.fork() == 0 and rest:
                    Path(rest).write_text(str(os.getpid()))  # noqa: ASYNC240
                    block()
            case "nonsense" | "large":
                said = b"\xff" * 64 if what == "nonsense" else b"\0\0\0\x7f"
                for descriptor in range(3, 64):
                    with contextlib.suppress(OSError):
                        os.write(descriptor, said)
                block()
            case "stubborn":
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.01)
            case "flood":
                asks = (
                    sampler.sample((n,), seed=n, temperature=1.0, max_tokens=1, stop_token_ids=()) for n in range(1000)
                )
                await asyncio.gather(*asks)
            case "environment":
                assert rest not in os.environ

    async def _leave(self) -> None:
        raise SystemExit(3)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return float(mask.sum())

    def loss_mask(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        if job.prompt == b"loss":
            block()
        return mask * (np.arange(len(mask)) > 5)

    def text(self, token_ids: Sequence[int]) -> str:
        return str(token_ids)
