"""Jobs made from a task's prompts, and samplers that need no engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample, Task

MANIFEST = bytes(32)


def jobs_of(task: Task, count: int, seed: int = 0, size: int = 1) -> list[Job]:
    out = []
    for number, prompt in enumerate(islice(task.jobs(seed), count)):
        group = Group(
            id=number.to_bytes(16, "big"),
            size=size,
            purpose="train",
            task=task.name,
            task_hash=task.hash,
            prompt=prompt.prompt,
            seed=number * size,
            temperature=1.0,
            max_tokens=prompt.max_tokens,
            stop_token_ids=task.stop_token_ids,
        )
        out += [job_of(group, i, bytes([i]) * 16, Version(0, 0)) for i in range(size)]
    return out


def sample_of(token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> Sample:
    """``token_ids``, made by two versions in turn."""
    half = len(token_ids) // 2
    spans = [
        Span(Version(0, 1), 0, half, MANIFEST, "recompute"),
        Span(Version(0, 2), half, len(token_ids), MANIFEST, "recompute"),
    ]
    ended = bool(token_ids) and token_ids[-1] in stop_token_ids
    logprobs = [-1.0 - token for token in token_ids]
    return Sample(token_ids, logprobs, [s for s in spans if s.start < s.end], "end" if ended else "length")


@dataclass
class RandomSampler:
    """Tokens that depend on the seed alone. ``choices``: to choose among. ``prompts``: those that were given."""

    choices: Sequence[int]
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        self.prompts.append(tuple(prompt_ids))
        drawn = random.Random(seed)
        token_ids: list[int] = []
        while len(token_ids) < max_tokens and not (token_ids and token_ids[-1] in stop_token_ids):
            token_ids.append(drawn.choice(self.choices))
        return sample_of(token_ids, stop_token_ids)


@dataclass
class PlayerSampler(RandomSampler):
    """Plays ``holdem`` in tokens of bytes, by a legal action that depends on the seed alone."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        self.prompts.append(tuple(prompt_ids))
        drawn, (stop,) = random.Random(seed), stop_token_ids
        legal = bytes(prompt_ids).decode().rpartition("Legal: ")[2].partition(".")[0].split(", ")
        action = drawn.choice(legal)
        if action.startswith("raise"):
            lowest, highest = map(int, action.removeprefix("raise ").split(" to "))
            action = f"raise {drawn.randint(lowest, min(highest, 2 * lowest))}"
        return sample_of([*f"Hm.\nAction: {action}".encode(), stop][:max_tokens], stop_token_ids)


@dataclass
class ScriptedSampler:
    """The turns of ``script``, one after the other."""

    script: list[list[int]]

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        return sample_of(self.script.pop(0)[:max_tokens], stop_token_ids)
