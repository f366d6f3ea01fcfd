"""A play in progress: tokens of the task and turns of the policy, in their order.

Promises: the next prompt is the last prompt, what the policy sampled, and what the task said after it; no token passes
through text. The mask is 1 on sampled tokens alone. Spans and log-probabilities lie at the places of their tokens.
Experts that an engine returned are left out of a play that would become too large for a record with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result, Span, routed_room
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.rollouts.routed_experts import RoutedTokens
from p2pcast.rollouts.top_logprobs import TopTokens
from p2pcast.tasks.task import ForgedPlayError, Sample, Sampler, Trajectory, turn_seed


class Play:
    """Begins with the prompt."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self.token_ids = list(prompt_ids)
        """All tokens so far: the prompt of the next turn."""
        self.sampled = 0
        """Tokens that the policy sampled."""
        self._mask = [0] * len(self.token_ids)
        self._logprobs = [0.0] * len(self.token_ids)
        self._spans: list[Span] = []
        self._turns: list[int] = []
        self._routed = RoutedTokens()
        self._top = TopTokens()

    async def turn(self, sampler: Sampler, job: Job, most: int, stop_token_ids: Sequence[int]) -> Sample:
        """Have the policy sample its next turn, of at most ``most`` tokens and of what the job leaves. Raises what the
        sampler raises.
        """
        sample = await sampler.sample(
            tuple(self.token_ids),
            seed=turn_seed(job, len(self._turns)),
            temperature=job.temperature,
            max_tokens=min(most, job.max_tokens - self.sampled),
            stop_token_ids=stop_token_ids,
        )
        self.add_turn(sample)
        return sample

    def add_turn(self, sample: Sample) -> None:
        """Raises RemoteError for a sample without tokens, or one too long for a record."""
        at, count = len(self.token_ids), len(sample.token_ids)
        if not 0 < count == len(sample.logprobs) or at + count > MAX_TOKENS:
            raise RemoteError(f"the sampler answered with {count} tokens and {len(sample.logprobs)} log-probabilities")
        self._turns.append(at)
        self.token_ids += sample.token_ids
        self._mask += [1] * count
        self._logprobs += sample.logprobs
        self._spans += [span._replace(start=span.start + at, end=span.end + at) for span in sample.spans]
        self.sampled += count
        if sample.experts is not None:
            self._routed.add(*sample.experts)
        if sample.top is not None:
            self._top.add(at, *sample.top)

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """The task's next tokens."""
        self.token_ids += token_ids
        self._mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)

    def end(self, stop: Literal["end", "length", "task"], tags: Iterable[tuple[str, str]] = ()) -> Trajectory:
        top = self._top.packed()
        room = routed_room(len(self.token_ids)) - (0 if top is None else top.nbytes)
        return Trajectory(
            token_ids=np.array(self.token_ids, "<u4"),
            mask=np.array(self._mask, "u1"),
            logprobs=np.array(self._logprobs, "<f4"),
            spans=tuple(self._spans),
            turns=np.array(self._turns, "<u4"),
            stop=stop,
            tags=tuple(tags),
            routed_experts=self._routed.packed(room),
            top_logprobs=top,
        )


class Replay:
    """Reads a finished play again, as the task would have played it. Raises ForgedPlayError where it would not."""

    def __init__(self, token_ids: np.ndarray, mask: np.ndarray) -> None:
        if len(token_ids) != len(mask):
            raise ForgedPlayError(f"{len(token_ids)} tokens and {len(mask)} values of the mask")
        self._token_ids: list[int] = token_ids.tolist()
        self._mask = mask
        self._at = 0

    @property
    def finished(self) -> bool:
        """No token is left."""
        return self._at == len(self._token_ids)

    def environment(self, token_ids: Sequence[int]) -> None:
        """The play goes on with these tokens, which the task said."""
        end = self._at + len(token_ids)
        if self._token_ids[self._at : end] != list(token_ids) or self._mask[self._at : end].any():
            raise ForgedPlayError(f"tokens {self._at} to {end} are not those that the task said")
        self._at = end

    def turn(self, most: int, stop_token_ids: Sequence[int] = ()) -> list[int]:
        """The policy's next turn: the sampled tokens that follow, at most ``most``, up to the first stop token."""
        start = self._at
        count = leading(self._mask[start : start + most] == 1)
        if not count:
            raise ForgedPlayError(f"token {start} is not a sampled one")
        said = up_to_stop(self._token_ids[start : start + count], stop_token_ids)
        self._at += len(said)
        return said

    def end(self) -> None:
        """Nothing may follow."""
        if not self.finished:
            raise ForgedPlayError(f"{len(self._token_ids) - self._at} tokens after the end of the play")


def leading(flags: np.ndarray) -> int:
    """Number of true values before the first false one."""
    return len(flags) if flags.all() else int(flags.argmin())


def up_to_stop(token_ids: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Tokens up to the first stop token, the stop token included; all of them without one."""
    for stop in stop_token_ids:
        # A search in C for each stop token: tasks have few, and a turn has many tokens.
        if stop in token_ids:
            token_ids = token_ids[: token_ids.index(stop) + 1]
    return token_ids


def result_of(
    job: Job,
    lease: bytes,
    played: Trajectory,
    reward: float,
    schedule: Callable[[Version], bytes | None] = lambda version: None,
) -> Result:
    """The result of a lease. ``reward``: the worker's own figure, for reports. ``schedule``: of the sparse attention
    with which a version sampled; None: dense.
    """
    sparse = [(v, name) for v in sorted({span.version for span in played.spans}) if (name := schedule(v)) is not None]
    return Result(
        job=job.job,
        lease=lease,
        task_hash=job.task_hash,
        token_ids=played.token_ids,
        mask=played.mask,
        logprobs=played.logprobs,
        spans=played.spans,
        temperature=job.temperature,
        reward=reward,
        stop=played.stop,
        turns=played.turns,
        tags=played.tags or None,
        schedules=sparse or None,
        routed_experts=played.routed_experts,
        top_logprobs=played.top_logprobs,
    )
