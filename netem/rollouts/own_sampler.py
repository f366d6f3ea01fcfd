"""Rollouts without an engine: plays of a task by a model in this process, many at a time, for seeded trials.

    model = AutoModelForCausalLM.from_pretrained(folder)
    groups = sampled_groups(model, task, islice(task.jobs(0), 32), size=8, seed=step, version=Version(0, step))
    rows = rows_of(batch_of(groups, step), …)

Any task whose plays await nothing but their sampler can be played: ``sums``, ``leduc``, ``holdem``, ``math``. All plays
advance together, turn by turn. Turns with prompts of equal length are one batch; equal prompts are computed once, and a
turn's further tokens use the KV cache. So no batch has padding, and log-probabilities need no attention mask.

Promise: equal weights, jobs and seeds give equal plays on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Rollout, RolloutBatch, RolloutGroup
from p2pcast.rollouts.job import Group, Job, job_of
from p2pcast.rollouts.result import Span
from p2pcast.tasks.play import result_of
from p2pcast.tasks.task import Prompt, Sample, Task, Trajectory

MOST_ROWS: Final = 1024
"""Of one forward pass, to bound memory."""
MANIFEST: Final = bytes(32)
WORKER: Final = "own-sampler"
FIRST: Final = Version(0, 0)


def play_all(model: Any, task: Task, jobs: Sequence[Job], *, seed: int, version: Version = FIRST) -> list[Trajectory]:
    """A play of each job, sampled at the job's temperature; greedily at 0, with log-probabilities of temperature 1.
    ``model``: a Hugging Face causal LM. ``version``: of its weights, for the spans. Raises UsageError for a task whose
    plays await something else than their sampler.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    sampler, ended, asked = _AskingSampler(), {}, {}
    plays = [task.play(sampler, job) for job in jobs]

    def advance(number: int, answer: Sample | None) -> None:
        try:
            turn: Any = plays[number].send(answer)
        except StopIteration as end:
            ended[number] = end.value
            return
        if not isinstance(turn, Turn):
            raise UsageError(f"a play of task {task.name} awaits something else than its sampler")
        asked[number] = turn

    try:
        for number in range(len(plays)):
            advance(number, None)
        while asked:
            turns, asked = asked, {}
            for number, sample in zip(turns, answers(model, list(turns.values()), generator, version), strict=True):
                advance(number, sample)
    finally:
        for play in plays:
            play.close()
    return [ended[number] for number in range(len(plays))]


def sampled_groups(
    model: Any,
    task: Task,
    prompts: Iterable[Prompt],
    *,
    size: int,
    seed: int,
    version: Version = FIRST,
    temperature: float = 1.0,
) -> list[RolloutGroup]:
    """``size`` plays of each prompt, with the task's rewards. At temperature 0 the groups are for evaluation."""
    play = partial(play_all, model, task, seed=seed, version=version)
    return groups_of(play, task, prompts, size=size, version=version, temperature=temperature)


def groups_of(
    play: Callable[[Sequence[Job]], Sequence[Trajectory]],
    task: Task,
    prompts: Iterable[Prompt],
    *,
    size: int,
    version: Version,
    temperature: float = 1.0,
) -> list[RolloutGroup]:
    """As ``sampled_groups``. ``play``: a play of each job, by weights of ``version``."""
    groups = [_group(task, prompt, number, size, version, temperature) for number, prompt in enumerate(prompts)]
    jobs = [[_job(group, index, version) for index in range(size)] for group in groups]
    plays = iter(play([job for members in jobs for job in members]))
    return [
        RolloutGroup(group, tuple(_rollout(task, job, next(plays)) for job in members))
        for group, members in zip(groups, jobs, strict=True)
    ]


def batch_of(groups: Sequence[RolloutGroup], step: int) -> RolloutBatch:
    """The batch of a learner's step. As the ledger does, groups of equal rewards are left out and count as played."""
    rewards = [[one.reward for one in group.rollouts] for group in groups]
    uneven = tuple(group for group, of_group in zip(groups, rewards, strict=True) if len(set(of_group)) > 1)
    mean = sum(map(sum, rewards)) / max(1, sum(map(len, rewards)))
    return RolloutBatch(step.to_bytes(16, "big"), step, uneven, len(groups), mean)


def _group(task: Task, prompt: Prompt, number: int, size: int, version: Version, temperature: float) -> Group:
    return Group(
        id=number.to_bytes(16, "big"),
        size=size,
        purpose="train" if temperature else "evaluate",
        task=task.name,
        task_hash=task.hash,
        prompt=prompt.prompt,
        seed=number * size,
        temperature=temperature,
        max_tokens=prompt.max_tokens,
        stop_token_ids=tuple(task.stop_token_ids),
        pinned=None if temperature else version,
    )


def _job(group: Group, index: int, version: Version) -> Job:
    return job_of(group, index, (group.seed + index).to_bytes(16, "big"), version)


def _rollout(task: Task, job: Job, played: Trajectory) -> Rollout:
    reward = task.reward(job, played.token_ids, played.mask)
    return Rollout(result_of(job, job.job, played, reward), reward, WORKER, job.oldest.step)


# -- turns


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The policy's next tokens, which a play awaits, or an engine's request."""

    prompt_ids: tuple[int, ...]
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    def __await__(self) -> Generator[Turn, Sample, Sample]:
        return (yield self)


class _AskingSampler:
    """Gives each turn to the loop that drives the plays."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        return await Turn(tuple(prompt_ids), temperature, max_tokens, tuple(stop_token_ids))


def answers(model: Any, turns: Sequence[Turn], generator: torch.Generator, version: Version) -> list[Sample]:
    """A sample of each turn, computed together where prompts are equally long. ``version``: of the model's weights."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for number, turn in enumerate(turns):
        key = (len(turn.prompt_ids), turn.temperature, turn.max_tokens, turn.stop_token_ids)
        alike.setdefault(key, []).append(number)
    out: dict[int, Sample] = {}
    for numbers in alike.values():
        for first in range(0, len(numbers), MOST_ROWS):
            chosen = numbers[first : first + MOST_ROWS]
            with torch.inference_mode():
                samples = _batch(model, [turns[number] for number in chosen], generator, version)
            out.update(zip(chosen, samples, strict=True))
    return [out[number] for number in range(len(turns))]


def _batch(model: Any, turns: Sequence[Turn], generator: torch.Generator, version: Version) -> list[Sample]:
    """``turns``: alike but for their prompts' tokens."""
    turn, device = turns[0], model.device
    stops = torch.tensor(turn.stop_token_ids, device=device)
    different = {prompt: number for number, prompt in enumerate(dict.fromkeys(one.prompt_ids for one in turns))}
    places = torch.tensor([different[one.prompt_ids] for one in turns], device=device)
    several = turn.max_tokens > 1
    answer = model(input_ids=torch.tensor(list(different), device=device), use_cache=several, logits_to_keep=1)
    logits, cache = answer.logits[places, -1], answer.past_key_values
    if several:
        cache.batch_select_indices(places)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    done = torch.zeros(len(turns), dtype=torch.bool, device=device)
    while True:
        drawn, of_drawn = _drawn(logits, turn.temperature, generator)
        tokens.append(drawn)
        logprobs.append(of_drawn)
        done |= torch.isin(drawn, stops)
        if len(tokens) == turn.max_tokens or done.all():
            break
        answer = model(input_ids=drawn[:, None], past_key_values=cache, use_cache=True)
        logits, cache = answer.logits[:, -1], answer.past_key_values
    said, likely = torch.stack(tokens, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist()
    return [_sample(*pair, turn.stop_token_ids, version) for pair in zip(said, likely, strict=True)]


def _drawn(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B,) and their log-probabilities (B,) by logits (B, V). Log-softmax in fp32."""
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
    else:
        drawn = logprobs.argmax(dim=-1, keepdim=True)
    return drawn[:, 0], logprobs.gather(1, drawn)[:, 0]


def _sample(tokens: list[int], logprobs: list[float], stop_token_ids: Sequence[int], version: Version) -> Sample:
    """Up to the first stop token."""
    count = next((at + 1 for at, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    stop: Literal["end", "length"] = "end" if tokens[count - 1] in stop_token_ids else "length"
    return Sample(tokens[:count], logprobs[:count], (Span(version, 0, count, MANIFEST, "recompute"),), stop)
