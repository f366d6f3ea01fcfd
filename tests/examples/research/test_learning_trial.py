"""Trials of the learner on rollouts of its own sampler."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.research.learning_trial import Trial, TrialOptions, run_trial
from netem.fleet.small_model import make_small_model
from p2pcast.ground.errors import UsageError
from p2pcast.tasks.sums import VOCABULARY, Sums
from tests.examples.research.trial_ages import watched_ages
from trainer_node.learning.learner_config import LearnerConfig, ModelTable, OptimizerTable, SftTable, TrainTable

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "model"
    return make_small_model(folder, VOCABULARY, hidden=64, layers=1, seed=1, dtype="bfloat16")


def config(model: Path, seed: int = 1) -> LearnerConfig:
    return LearnerConfig(
        model=ModelTable(model, compute="float32"),
        train=TrainTable(seed=seed, packing="padded"),
        optimizer=OptimizerTable(lr=1e-3),
        sft=SftTable(steps=60),
    )


TASK = Sums(digits=1, held_out=10)


def trial(model: Path, lag: int, seed: int = 1) -> Trial:
    return run_trial(config(model, seed), TASK, TrialOptions(STEPS, groups=4, size=4, lag=lag, problems=32))


def test_equal_arguments_give_an_equal_trial(model: Path) -> None:
    first = trial(model, 1)
    assert first == trial(model, 1)
    assert first != trial(model, 1, seed=2)
    assert len(first.rewards) == STEPS
    assert all(0 <= reward <= 1 for reward in (*first.rewards, *first.held_out))


@pytest.mark.parametrize("lag", [0, 2])
def test_rollouts_have_the_stated_age(model: Path, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = watched_ages(monkeypatch)
    trial(model, lag)
    assert ages
    assert all(version == max(0, step - lag) for step, version in ages)
    assert max(step for step, _ in ages) > lag


def test_rise_compares_both_ends() -> None:
    assert Trial((0.1, 0.1, 0.5, 0.4, 0.4), (), ()).rise(2) == pytest.approx(0.3)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 1, "size": 1}, {"steps": 1, "lag": -1}])
def test_a_trial_that_makes_no_sense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="cannot be run"):
        TrialOptions(**options)
