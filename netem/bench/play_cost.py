"""Cost of a turn of a play in a process of its own, beside the same turn in the worker's process.

The engine is a sampler that answers at once, so that the time is that of the exchange alone. Both ways take turns in
one run, and play the same jobs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from p2pcast.ground.version import Version
from p2pcast.process import event_loop
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.result import Span
from p2pcast.tasks.child_processes.play_pool import PlayPool
from p2pcast.tasks.play import Play
from p2pcast.tasks.task import Prompt, Sample, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask

NAME = "netem.bench.play_cost:ManyTurns"
SAID, HEARD = 64, 16
"""Tokens of a turn of the policy, and of the task."""
TURNS = 16


class ManyTurns(HashedTask):
    """``prompt_tokens``: before the first turn."""

    name, vocabulary, stop_token_ids = "many_turns", 1 << 16, ()

    def __init__(self, prompt_tokens: int = 1024) -> None:
        self.prompt_tokens = prompt_tokens

    def jobs(self, seed: int) -> Iterator[Prompt]:
        while True:
            yield Prompt(b"", SAID * TURNS)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(range(self.prompt_tokens))
        for _ in range(TURNS):
            await play.turn(sampler, job, SAID, ())
            play.add_environment(range(HEARD))
        return play.end("task")

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        return 0.0

    def text(self, token_ids: Sequence[int]) -> str:
        return str(token_ids)


class _Engine:
    async def sample(self, prompt_ids: Sequence[int], *, max_tokens: int, **_: Any) -> Sample:
        await asyncio.sleep(0)
        spans = [Span(Version(0, 1), 0, max_tokens, bytes(32), "recompute")]
        return Sample(range(max_tokens), [-1.0] * max_tokens, spans, "length")


def bench_plays(prompt_tokens: int, at_once: int, rounds: int) -> dict[str, Any]:
    """``here``, ``pool``: milliseconds of a turn, and the processor time that a turn takes of the worker's process."""
    return event_loop.run(_bench(prompt_tokens, at_once, rounds))


async def _bench(prompt_tokens: int, at_once: int, rounds: int) -> dict[str, Any]:
    task, engine = ManyTurns(prompt_tokens), _Engine()
    pool = PlayPool(f"{NAME},prompt_tokens={prompt_tokens}", task.hash)
    jobs = _jobs(task, at_once)
    ways: dict[str, Any] = {
        "here": lambda: asyncio.gather(*(task.play(engine, job) for job in jobs)),
        "pool": lambda: asyncio.gather(*(pool.play(engine, job) for job in jobs)),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    try:
        for number in range(rounds + 1):
            for way, play in ways.items():
                began_s, used_s = time.perf_counter(), time.process_time()
                await play()
                if number:  # the first round starts the process
                    times[way].append((time.perf_counter() - began_s, time.process_time() - used_s))
    finally:
        await pool.close()
    found: dict[str, Any] = {"prompt_tokens": prompt_tokens, "at_once": at_once}
    for way, rows in times.items():
        turn_ms, worker_ms = (1e3 * median(column) / TURNS / at_once for column in zip(*rows, strict=True))
        found[way] = {"turn_ms": turn_ms, "worker_cpu_ms": worker_ms}
    return found


def _jobs(task: ManyTurns, count: int) -> list[Job]:
    prompt = next(task.jobs(0))
    group = Group(
        id=bytes(16),
        size=count,
        purpose="train",
        task=task.name,
        task_hash=task.hash,
        prompt=prompt.prompt,
        seed=0,
        temperature=1.0,
        max_tokens=prompt.max_tokens,
    )
    return [job_of(group, number, number.to_bytes(16, "big"), Version(0, 0)) for number in range(count)]
