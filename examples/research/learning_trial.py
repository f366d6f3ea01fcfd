"""A run of the learner in one process, for seeded trials of rewards and staleness. Rollouts come from its own sampler,
or from an engine that is given.

    trial = run_trial(LearnerConfig(model=ModelTable(folder), …), Sums(), TrialOptions(steps=160, lag=3))

The step, its losses, masters and warm start are those of ``p2pcast learn``. Rollouts of step t come from the weights
after step t - lag, or from the first weights. As at the ledger, groups of equal rewards are played again until the
batch is full or ``OVERSAMPLE`` times its groups were played, and rewards count over all groups played.

Promise: without an engine, equal arguments give an equal trial on one machine and number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Protocol

import torch

from netem.rollouts.own_sampler import batch_of, groups_of, play_all
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import RolloutGroup
from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import Prompt, Task, Trajectory
from trainer_node.learning import warm_start
from trainer_node.learning.learner_config import LearnerConfig
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.objective.training_rows import rows_of
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks

OVERSAMPLE: Final = 3
"""As the ledger's default: a batch is cut with what there is after so many times its groups were played."""
HELD_OUT_SEED: Final = 1
ALONE: Final = TrainerRanks(0, 1, torch.device("cpu"))


class TrialTask(Task, Protocol):
    """A task with problems of its own for evaluation."""

    def evaluation_jobs(self, seed: int) -> Iterator[Prompt]: ...


class TrialEngine(Protocol):
    """Plays with one version's weights at a time."""

    def serve(self, step: int, words: Mapping[str, torch.Tensor]) -> Version:
        """From now on plays use these weights, which the caller does not change. ``words``: as published, by their
        names in the model's folder. Returns the version that spans name.
        """

    def play(self, jobs: Sequence[Job], *, seed: int) -> Sequence[Trajectory]: ...


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """``groups`` of ``size`` rollouts make a batch. ``lag``: age of the rollouts' weights in learner steps.
    ``problems``: held-out problems, sampled once each before the first and after the last step. ``seed``: of prompts
    and rollouts; None for the configuration's, which is that of the warm start and of the steps.
    """

    steps: int
    groups: int = 32
    size: int = 8
    lag: int = 0
    problems: int = 512
    seed: int | None = None

    def __post_init__(self) -> None:
        if min(self.steps, self.groups, self.problems) < 1 or self.size < 2 or self.lag < 0:
            raise UsageError(f"a trial of {self} cannot be run: groups need two rollouts, and counts are positive")


class Answer(NamedTuple):
    """An answer to a held-out problem. ``tags``: of the task."""

    reward: float
    tags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """``rewards``: of each step, the mean over all rollouts played. ``before``, ``after``: answers to the held-out
    problems, in their order.
    """

    rewards: tuple[float, ...]
    before: tuple[Answer, ...]
    after: tuple[Answer, ...]

    @property
    def held_out(self) -> tuple[float, float]:
        """Mean rewards before and after."""
        before, after = (sum(one.reward for one in answers) / len(answers) for answers in (self.before, self.after))
        return before, after

    def rise(self, steps: int = 10) -> float:
        """Mean reward of the last ``steps`` steps above that of the first ones."""
        return sum(self.rewards[-steps:]) / steps - sum(self.rewards[:steps]) / steps


def run_trial(
    config: LearnerConfig, task: TrialTask, options: TrialOptions, engine: TrialEngine | None = None
) -> Trial:
    """``config``: its model, advantage, loss, optimizer, sft and train tables count. ``engine``: None for the trial's
    own sampler. Raises UsageError, and what the engine raises.
    """
    assert config.model.path is not None
    model = LearnerModel(config.model.path, ALONE, compute=config.model.compute)
    weights = TrainedWeights(model.parameters, model.published, config.optimizer.options())
    if config.sft.steps:
        warm_start.start(model, weights, task, config, ALONE)
    step_of = LearnerStep(
        model,
        weights,
        StepOptions(
            config.loss.options(),
            config.train.micro_batch_tokens,
            config.train.packing,
            config.train.minibatches,
            config.train.seed,
        ),
        ALONE,
    )
    seed = config.train.seed if options.seed is None else options.seed
    prompts = task.jobs(seed)
    if engine is None:
        engine = _OwnEngine(LearnerModel(config.model.path, ALONE, compute=config.model.compute), task)
    kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque([(0, _words(model))], maxlen=options.lag + 1)
    version = engine.serve(*kept[0])
    before = _held_out(engine, version, task, options, seed)
    rewards = []
    for step in range(options.steps):
        groups = _played(engine, version, task, prompts, options, seed * 1_000_003 + step * OVERSAMPLE)
        batch = batch_of(groups, step)
        rewards.append(batch.mean_reward or 0.0)
        if batch.groups:
            rows = rows_of(
                batch,
                kind=config.advantage.kind,
                eps=config.advantage.eps,
                overlong=config.train.overlong,
                step=step,
                staleness=options.lag,
                vocabulary=model.vocabulary,
            )
            step_of.train(rows, step, lambda: None)
        kept.append((step + 1, _words(model)))
        version = engine.serve(*kept[0])
    version = engine.serve(*kept[-1])
    return Trial(tuple(rewards), before, _held_out(engine, version, task, options, seed))


def _words(model: LearnerModel) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.working_copy()}


class _OwnEngine:
    """Samples in this process."""

    def __init__(self, model: LearnerModel, task: Task) -> None:
        model.freeze()
        self._model, self._task = model, task
        self._version = Version(0, 0)

    def serve(self, step: int, words: Mapping[str, torch.Tensor]) -> Version:
        with torch.no_grad():
            for name, tensor in self._model.working_copy():
                tensor.copy_(words[name])
        self._version = Version(0, step)
        return self._version

    def play(self, jobs: Sequence[Job], *, seed: int) -> Sequence[Trajectory]:
        return play_all(self._model.module, self._task, jobs, seed=seed, version=self._version)


def _played(
    engine: TrialEngine,
    version: Version,
    task: Task,
    prompts: Iterator[Prompt],
    options: TrialOptions,
    drawn: int,
) -> list[RolloutGroup]:
    """All groups played for a batch, those of equal rewards included; at most the batch's groups are unequal.
    ``drawn``: the first of ``OVERSAMPLE`` seeds.
    """
    groups: list[RolloutGroup] = []
    unequal = 0
    for turn in range(OVERSAMPLE):
        wanted = options.groups - unequal
        if not wanted:
            break
        play = partial(engine.play, seed=drawn + turn)
        played = groups_of(play, task, islice(prompts, wanted), size=options.size, version=version)
        groups += played
        unequal += sum(len({one.reward for one in group.rollouts}) > 1 for group in played)
    return groups


def _held_out(
    engine: TrialEngine, version: Version, task: TrialTask, options: TrialOptions, seed: int
) -> tuple[Answer, ...]:
    problems = islice(task.evaluation_jobs(HELD_OUT_SEED), options.problems)
    groups = groups_of(partial(engine.play, seed=seed), task, problems, size=1, version=version)
    answers = (group.rollouts[0] for group in groups)
    return tuple(Answer(one.reward, tuple(one.result.tags or ())) for one in answers)
