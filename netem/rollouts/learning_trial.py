"""A run of the learner in one process, on rollouts of its own sampler: for seeded trials of rewards and staleness.

    trial = run_trial(LearnerConfig(model=ModelTable(folder), …), Sums(), TrialOptions(steps=160, lag=3))

The step, its losses, masters and warm start are those of ``p2pcast learn``. Rollouts of step t come from the weights
after step t - lag, or from the first weights. As at the ledger, groups of equal rewards are played again until the
batch is full or ``OVERSAMPLE`` times its groups were played, and rewards count over all groups played.

Promise: equal arguments give an equal trial on one machine and number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import torch

from netem.rollouts.own_sampler import batch_of, sampled_groups
from p2pcast.errors import UsageError
from p2pcast.tasks.task import Prompt, Task
from p2pcast.version import Version
from trainer_node.learning import warm_start
from trainer_node.learning.learner_config import LearnerConfig
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.objective.training_rows import rows_of
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.batch_client import RolloutGroup

OVERSAMPLE: Final = 3
"""As the ledger's default: a batch is cut with what there is after so many times its groups were played."""
HELD_OUT_SEED: Final = 1
ALONE: Final = TrainerRanks(0, 1, torch.device("cpu"))


class TrialTask(Task, Protocol):
    """A task with problems of its own for evaluation."""

    def evaluation_jobs(self, seed: int) -> Iterator[Prompt]: ...


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


def run_trial(config: LearnerConfig, task: TrialTask, options: TrialOptions) -> Trial:
    """``config``: its model, advantage, loss, optimizer, sft and train tables count. Raises UsageError."""
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
    engine = _Engine(LearnerModel(config.model.path, ALONE, compute=config.model.compute), options.lag)
    engine.publish(model, 0)
    before = _held_out(model, task, options, seed)
    rewards = []
    for step in range(options.steps):
        groups = _played(engine, task, prompts, options, seed, step)
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
        engine.publish(model, step + 1)
    return Trial(tuple(rewards), before, _held_out(model, task, options, seed))


class _Engine:
    """Samples with weights of an exact age."""

    def __init__(self, model: LearnerModel, lag: int) -> None:
        model.freeze()
        self._model = model
        self._versions: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)
        self.step = 0

    @property
    def module(self) -> Any:
        return self._model.module

    def publish(self, model: LearnerModel, step: int) -> None:
        """Serve the oldest version within the lag, now that the model is that after ``step``."""
        self._versions.append((step, {name: one.detach().clone() for name, one in model.working_copy()}))
        self.step, words = self._versions[0]
        with torch.no_grad():
            for name, tensor in self._model.working_copy():
                tensor.copy_(words[name])


def _played(
    engine: _Engine, task: Task, prompts: Iterator[Prompt], options: TrialOptions, seed: int, step: int
) -> list[RolloutGroup]:
    """All groups played for a batch, those of equal rewards included; at most the batch's groups are unequal."""
    groups: list[RolloutGroup] = []
    unequal = 0
    for turn in range(OVERSAMPLE):
        wanted = options.groups - unequal
        if not wanted:
            break
        drawn = seed * 1_000_003 + step * OVERSAMPLE + turn
        version = Version(0, engine.step)
        played = sampled_groups(
            engine.module, task, islice(prompts, wanted), size=options.size, seed=drawn, version=version
        )
        groups += played
        unequal += sum(len({one.reward for one in group.rollouts}) > 1 for group in played)
    return groups


def _held_out(model: LearnerModel, task: TrialTask, options: TrialOptions, seed: int) -> tuple[Answer, ...]:
    problems = islice(task.evaluation_jobs(HELD_OUT_SEED), options.problems)
    groups = sampled_groups(model.module, task, problems, size=1, seed=seed)
    answers = (group.rollouts[0] for group in groups)
    return tuple(Answer(one.reward, tuple(one.result.tags or ())) for one in answers)
