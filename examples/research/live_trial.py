"""The engine of a trial as users have it: vLLM, whose weights a trainer publishes, a hub stores and a peer installs.

    with live_engine(folder, base, task) as engine:
        run_trial(config, task, TrialOptions(steps=100, lag=3), engine)

Promise: plays begin once the engine serves the version, and no other comes until they end, so their age is exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import aiohttp
import torch

from netem.fleet.participants import FIRST_PEER, Programs
from netem.fleet.processes import Processes
from netem.fleet.wait import HTTP_S, FleetWatch
from netem.fleet.workspace import Workspace
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import Sample, Sampler, Task, Trajectory
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from trainer_node.sdk.publisher import Publisher

ENGINE_WORDS: Final = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
SLOTS: Final = 64
"""Plays at the same time."""
LIVE_S: Final = 900.0
"""Time limit in seconds for vLLM's start, and for a version on its way to the engine."""


@contextmanager
def live_engine(folder: Path, base: Path, task: Task) -> Iterator[LiveEngine]:
    """``folder``: for logs and states, replaced. ``base``: a Hugging Face folder. Raises P2PCastError."""
    with Workspace(folder) as work, Processes(work.logs) as processes, asyncio.Runner() as runner:
        programs = _Programs(work, processes, base)
        peer = runner.run(programs.start())
        with Publisher(programs.fleet.place.hub, token_file=programs.fleet.token, base=base) as publisher:
            yield LiveEngine(runner, publisher, task, programs.engine_url, peer)


class LiveEngine:
    """``engine``, ``peer``: URLs of vLLM and of the peer that installs its weights."""

    def __init__(self, runner: asyncio.Runner, publisher: Publisher, task: Task, engine: str, peer: str) -> None:
        self._runner, self._publisher, self._task = runner, publisher, task
        self._engine, self._peer = engine, peer
        self._served: Version | None = None

    def serve(self, step: int, words: Mapping[str, torch.Tensor]) -> Version:
        """Publishes a step that is not served yet. Steps must not descend."""
        if self._served is None or self._served.step != step:
            publish = self._publisher.resume if self._served is None else self._publisher.publish
            handle = publish(step, words.items())
            handle.wait_live(1.0, LIVE_S)
            self._served = handle.wait_durable()
        return self._served

    def play(self, jobs: Sequence[Job], *, seed: int) -> Sequence[Trajectory]:
        """Raises IntegrityError for a token that another version sampled."""
        return self._runner.run(self._play(jobs, seed))

    async def _play(self, jobs: Sequence[Job], seed: int) -> Sequence[Trajectory]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            versions = EngineVersions(http, self._peer, self._engine)
            await versions.refresh()
            sampler, free = (
                _SeededSampler(GenerateSampler(http, self._engine, versions), seed),
                asyncio.Semaphore(SLOTS),
            )

            async def play(job: Job) -> Trajectory:
                async with free:
                    return await self._task.play(sampler, job)

            played = await asyncio.gather(*map(play, jobs))
        for span in (span for one in played for span in one.spans):
            if span.version != self._served:
                raise IntegrityError(f"the engine sampled with version {span.version}, and should serve {self._served}")
        return played


class _SeededSampler:
    """The jobs of each step have equal seeds: ``seed`` tells steps apart."""

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler, self._seed = sampler, seed

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        return await self._sampler.sample(
            prompt_ids,
            seed=seed ^ self._seed,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )


class _Programs(Programs):
    def __init__(self, work: Workspace, processes: Processes, base: Path) -> None:
        super().__init__(work, processes)
        self._base = base

    async def start(self) -> str:
        """The peer's URL, once vLLM and the peer are ready."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_S)) as http:
            watch = FleetWatch(self._processes, self._work.state, http, lambda: None)
            engine = self._start_engine(self._base, [*ENGINE_WORDS, "--max-num-seqs", str(SLOTS)])
            await watch.daemon("hub", self._start_hub(self._base))
            peer = self._start_peer(FIRST_PEER, "--install", f"vllm:{self.engine_url}")
            url = await watch.daemon(FIRST_PEER, peer, ready=False)
            await watch.until_answers("vLLM", engine, LIVE_S, self.engine_url + "/health")
            await watch.until_answers(FIRST_PEER, peer, LIVE_S, url + "/readyz")
            return url
