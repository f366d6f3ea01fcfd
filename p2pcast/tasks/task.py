"""Protocols of tasks and of samplers, and the records that pass between them.

A task makes prompts, plays a job with a sampler, and gives the reward of a play. The ledger computes the reward again,
from the job and the tokens alone, and never uses a worker's figure.

Promises that every task has to keep:

- ``play`` and ``reward`` depend on the job and the tokens alone. So equal tokens give equal rewards on every machine.
- ``reward`` refuses tokens that the task itself would not have said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import blake3
import numpy as np

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.ground.plain_text import shown_text
from p2pcast.rollouts.job import MAX_PROMPT_BYTES, Job
from p2pcast.rollouts.result import Span
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.rollouts.routed_experts import RoutedExperts
from p2pcast.rollouts.top_logprobs import TopLogprobs

SEED_BITS = 63
"""Bits of a sampler's seed, because engines take signed 64-bit integers."""


MAX_ROW = 200
"""Most characters of a prompt's row."""
FAILED_CHECK_TAG = "check"
"""Name of the tag that a worker adds to a play whose check failed there."""
TrustedReward = Literal["costly", "unrepeatable"]


class ForgedPlayError(RemoteError):
    """The tokens are not those of a play of this job: the task would have produced different ones."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``prompt``: bytes that the task alone reads. ``max_tokens``: most tokens that the policy may sample. ``row``: the
    prompt's place in the data, for messages to people; empty where the task does not say.
    """

    prompt: bytes
    max_tokens: int
    row: str = field(default="", compare=False)


class SampledExperts(NamedTuple):
    """Experts of the tokens that a request computed, from token ``start`` of its prompt on. ``ids``: tokens × layers ×
    experts a token, uint8 or uint16.
    """

    start: int
    ids: np.ndarray


class SampledTop(NamedTuple):
    """The most probable tokens at each sampled token: tokens × count, uint32 and float32."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of the policy. ``logprobs``: of each token under the sampling distribution. ``spans``: start and end
    count from the first sampled token. ``stop``: ``end`` after a stop token, ``length`` at the limit. ``experts``: of a
    mixture of experts, where the engine returns them. ``top``: where the sampler asked for them.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[Span]
    stop: Literal["end", "length"]
    experts: SampledExperts | None = None
    top: SampledTop | None = None


class Sampler(Protocol):
    """An engine from a play's point of view."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        """Return tokens that follow ``prompt_ids``, including a sampled stop token. Raises P2PCastError."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A whole play: the fields of a Result except ids and reward."""

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    spans: tuple[Span, ...]
    turns: np.ndarray
    stop: Literal["end", "length", "task"]
    tags: tuple[tuple[str, str], ...] = ()
    routed_experts: RoutedExperts | None = None
    top_logprobs: TopLogprobs | None = None


class Task(Protocol):
    """``name``: of the task in jobs. ``hash``: 32 bytes, of the task's code and settings. ``vocabulary``: number of
    token ids.
    """

    @property
    def name(self) -> str: ...
    @property
    def hash(self) -> bytes: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...

    def jobs(self, seed: int) -> Iterator[Prompt]:
        """Yield prompts endlessly. Equal seeds give equal prompts."""

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        """Play one job. Raises what the sampler raises."""

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        """Compute a play's reward from its tokens. Raises ForgedPlayError."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the tokens as text for people."""


@dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
    """A whole play to imitate. ``token_ids``, ``mask`` (n,): as of a Trajectory, 1 on tokens that a policy samples."""

    token_ids: np.ndarray
    mask: np.ndarray


@runtime_checkable
class Demonstrating(Protocol):
    """A task that offers demonstrations, for a supervised warm start."""

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        """Yield demonstrations endlessly, none of a held-out problem. Equal seeds give equal demonstrations."""


@runtime_checkable
class HoldingOut(Protocol):
    """A task that excludes problems from training, for evaluation. The task's hash is the same for both."""

    def held_out(self, prompt: bytes) -> bool:
        """Whether neither ``jobs`` nor demonstrations give the prompt's problem. Depends on the problem and on the
        task's settings alone.
        """

    def evaluation_jobs(self, seed: int) -> Iterator[Prompt]:
        """Yield held-out prompts endlessly. Equal seeds give equal prompts. Raises UsageError if none are held out."""


class FaultyPrompt(NamedTuple):
    """``name``: number and row. ``why``: no group can be made of the prompt."""

    name: str
    why: str


def prompt_fault(found: object) -> str | None:
    """Why no group can be made of what a task produced, or None if it is a valid prompt."""
    if not isinstance(found, Prompt):
        return f"not a Prompt, but of type {type(found).__name__}: {shown_text(repr(found)[:80])}"
    if type(found.prompt) is not bytes:
        return f"its prompt is of type {type(found.prompt).__name__}, not bytes"
    if len(found.prompt) > MAX_PROMPT_BYTES:
        return f"its prompt has {len(found.prompt)} bytes, and {MAX_PROMPT_BYTES} are allowed"
    if type(found.max_tokens) is not int or not 1 <= found.max_tokens <= MAX_TOKENS:
        return f"its max_tokens is {shown_text(repr(found.max_tokens)[:80])}, not an int from 1 to {MAX_TOKENS}"
    return None


def prompt_name(number: int, found: object) -> str:
    """``number``: of the prompt, among the prompts of its seed, from 0 on. ``found``: by the task."""
    row = shown_text(found.row)[:MAX_ROW] if isinstance(found, Prompt) and found.row else ""
    return f"prompt {number} ({row})" if row else f"prompt {number}"


def demonstrations_of(task: Task, seed: int) -> Iterator[Demonstration]:
    """Return the task's demonstrations. Raises UsageError if it has none."""
    if not isinstance(task, Demonstrating):
        raise UsageError(
            f"task {task.name} offers no demonstrations: a warm start needs its method demonstrations(seed)"
        )
    return task.demonstrations(seed)


def evaluation_jobs_of(task: Task, seed: int) -> Iterator[Prompt]:
    """Return the task's evaluation jobs. Raises UsageError if it holds no problems out."""
    if not isinstance(task, HoldingOut):
        raise UsageError(
            f"task {task.name} holds no problems out: evaluation needs its methods held_out(prompt) and"
            " evaluation_jobs(seed)"
        )
    return task.evaluation_jobs(seed)


def turn_seed(job: Job, turn: int) -> int:
    """The sampler's seed for one turn of a job, which differs between turns and between jobs."""
    packed = job.sample_seed.to_bytes(8, "little") + turn.to_bytes(4, "little")
    return int.from_bytes(blake3.blake3(packed).digest(8), "little") % (1 << SEED_BITS)


def trusted_reward_of(task: Any) -> TrustedReward | None:
    """Why the ledger may not compute each reward: ``costly``, a replay gives the same but takes long; ``unrepeatable``,
    equal tokens may have other rewards. None: the ledger computes each reward. Raises UsageError.
    """
    found = getattr(task, "trusted_reward", None)
    if found not in (None, "costly", "unrepeatable"):
        raise UsageError(f"task {task.name}: trusted_reward is {found!r}, neither 'costly' nor 'unrepeatable'")
    return cast("TrustedReward | None", found)


def check_task(task: Any, named: str) -> str | None:
    """Why an object is not a task, or None if it is one. ``named``: its name in the message."""
    for attribute in ("name", "hash", "vocabulary", "stop_token_ids", "jobs", "play", "reward", "text"):
        if not hasattr(task, attribute):
            return f"{named} is no task: it has no {attribute!r}"
    return None
