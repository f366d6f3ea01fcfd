"""Trials on rollouts of a live engine: every token is by the weights of the stated age."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.research.learning_trial import TrialOptions, run_trial
from examples.research.live_trial import LiveEngine, live_engine
from netem.fleet.small_model import make_small_model
from netem.rollouts.own_sampler import groups_of
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.tasks.sums import VOCABULARY, Sums
from p2pcast.tasks.task import Prompt
from tests.examples.research.trial_ages import watched_ages
from tests.support.fake_engine import FakeEngine
from trainer_node.learning.learner_config import LearnerConfig, ModelTable, OptimizerTable, SftTable, TrainTable

TASK = Sums(digits=1, held_out=10)


class Announcing:
    """A publisher's place: the engine serves what is published, at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.published: list[int] = []

    def publish(self, step: int, named_tensors: Any) -> Announcing:
        self._engine.versions = [f"1.{step}"]
        self.published.append(step)
        return self

    resume = publish

    def wait_live(self, fraction: float, timeout_s: float) -> None: ...

    def wait_durable(self) -> Version:
        return Version(1, self.published[-1])


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(versions=["1.0"])


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[LiveEngine]:
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield LiveEngine(runner, Announcing(engine), TASK, engine.url, engine.url)  # type: ignore[arg-type]
        runner.run(engine.stop())


def prompts() -> list[Prompt]:
    return [prompt for prompt, _ in zip(TASK.jobs(0), range(4), strict=False)]


def test_a_step_is_published_once(live: LiveEngine) -> None:
    assert [live.serve(step, {}) for step in (0, 0, 1, 1, 3)] == [Version(1, step) for step in (0, 0, 1, 1, 3)]
    assert live._publisher.published == [0, 1, 3]  # type: ignore[attr-defined]


def test_tokens_of_another_version_are_refused(live: LiveEngine, engine: FakeEngine) -> None:
    version = live.serve(0, {})
    groups = groups_of(lambda jobs: live.play(jobs, seed=1), TASK, prompts(), size=2, version=version)
    assert {span.version for group in groups for one in group.rollouts for span in one.result.spans} == {version}
    engine.versions = ["1.0", "1.1"]
    engine.tokens_a_version = 20
    with pytest.raises(IntegrityError, match=r"sampled with version 1\.1, and should serve 1\.0"):
        groups_of(lambda jobs: live.play(jobs, seed=1), TASK, prompts() * 8, size=2, version=version)


def test_requests_of_two_steps_have_other_seeds(live: LiveEngine, engine: FakeEngine) -> None:
    version = live.serve(0, {})
    for seed in (1, 2):
        groups_of(lambda jobs, seed=seed: live.play(jobs, seed=seed), TASK, prompts(), size=2, version=version)  # type: ignore[misc]
    seeds = [body["sampling_params"]["seed"] for body in engine.asked]
    assert len(seeds) == len(set(seeds)) == 16


@pytest.mark.prove
def test_rollouts_of_a_live_vllm_have_the_stated_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_small_model(tmp_path / "model", VOCABULARY, hidden=64, layers=1, seed=1, dtype="bfloat16")
    config = LearnerConfig(
        model=ModelTable(base, compute="float32"),
        train=TrainTable(seed=1, packing="padded"),
        optimizer=OptimizerTable(lr=1e-3),
        sft=SftTable(steps=60),
    )
    ages = watched_ages(monkeypatch)
    with live_engine(tmp_path / "live", base, TASK) as engine:
        found = run_trial(config, TASK, TrialOptions(4, groups=8, size=4, lag=1, problems=32), engine)
    assert len(found.rewards) == 4
    assert len(found.after) == 32
    assert ages
    assert all(version == max(0, step - 1) for step, version in ages)
    assert max(step for step, _ in ages) > 1
