"""Warm start: the loss is the cross-entropy of the mask's tokens; it falls, and the model learns the task."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from netem.fleet.small_model import SmallModel, make_small_model
from netem.rollouts.own_sampler import sampled_groups
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Demonstration
from p2pcast.tasks.task_loader import load_task
from tests.trainer_node.learning.learner_stage import ALONE
from tests.trainer_node.learning.tiny_model import logprobs_of
from trainer_node.learning.learner_config import LearnerConfig, ModelTable, SftTable
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights
from trainer_node.learning.warm_start import WarmStartOptions, start, warm_start

pytestmark = pytest.mark.device

TASK = Sums(digits=1, held_out=20)


def small_model(seed=0, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallModel(16, hidden=64, layers=1, **changes).made()


def warmed(model, options, demonstrations=None, vocabulary=16):
    """The losses."""
    parameters = dict(model.named_parameters())
    weights = TrainedWeights(parameters, {name: p.dtype for name, p in parameters.items()}, options.optimizer())
    return warm_start(
        lambda batch: logprobs_of(model, batch),
        weights,
        TASK.demonstrations(options.seed) if demonstrations is None else demonstrations,
        options,
        vocabulary=vocabulary,
    )


def bits(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def reward(model, task, prompts):
    groups = sampled_groups(model, task, islice(prompts, 64), size=4, seed=1)
    return np.mean([one.reward for group in groups for one in group.rollouts])


def slow_loss(model, demonstrations):
    """Token by token, each demonstration alone."""
    found = []
    for one in demonstrations:
        tokens = torch.tensor(one.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0]
        places = [at for at in range(1, len(tokens)) if one.mask[at]]
        found += [torch.nn.functional.cross_entropy(logits[at - 1], tokens[at]) for at in places]
    return float(torch.stack(found).mean())


def test_the_loss_falls_and_the_reward_rises():
    model = small_model()
    before = reward(model, TASK, TASK.jobs(0))
    losses = warmed(model, WarmStartOptions(100, batch=32, lr=5e-3, warmup_steps=10))
    assert len(losses) == 100
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert reward(model, TASK, TASK.jobs(0)) > before + 0.3


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize("most_tokens", [60, 8192])
def test_the_first_loss_is_the_mean_cross_entropy_of_the_masks_tokens(packing, most_tokens):
    model = small_model()
    expected = slow_loss(model, islice(TASK.demonstrations(3), 16))
    options = WarmStartOptions(1, batch=16, seed=3, packing=packing, most_tokens=most_tokens)
    assert warmed(model, options)[0] == pytest.approx(expected, abs=1e-5)


def test_tokens_outside_the_mask_are_not_learnt():
    """Other targets at these places leave the loss as it is; with a mask on them it changes."""
    model, options = small_model(), WarmStartOptions(1, batch=1)
    one = next(TASK.demonstrations(0))
    last_of_prompt = int(np.flatnonzero(one.mask == 0)[-1])
    whole = Demonstration(one.token_ids, np.ones_like(one.mask))
    tail = Demonstration(one.token_ids, np.where(np.arange(len(one.mask)) > last_of_prompt, one.mask, 0))
    losses = [warmed(small_model(), options, iter([each]))[0] for each in (one, tail, whole)]
    assert losses[0] == losses[1] == pytest.approx(slow_loss(model, [one]), abs=1e-5)
    assert losses[2] == pytest.approx(slow_loss(model, [whole]), abs=1e-5)
    assert losses[2] != pytest.approx(losses[0], abs=1e-3)


def test_equal_seeds_give_equal_weights():
    found = []
    for seed in (4, 4, 5):
        model = small_model()
        losses = warmed(model, WarmStartOptions(4, batch=8, seed=seed))
        found.append((losses, bits(model)))
    assert found[0] == found[1] != found[2]


def test_a_legal_player_is_learnt():
    pytest.importorskip("pyspiel", reason="needs the extra leduc")
    task: Any = load_task("leduc,held_out=20")
    model = small_model()
    warmed(model, WarmStartOptions(60, batch=16, lr=5e-3, warmup_steps=5), task.demonstrations(0))
    groups = sampled_groups(model, task, islice(task.evaluation_jobs(0), 100), size=2, seed=1)
    results = [one.result for group in groups for one in group.rollouts]
    forfeits = sum(("forfeit", "yes") in result.tags for result in results)
    assert forfeits / sum(len(result.turns) for result in results) < 0.1


# -- the learner's weights


def test_masters_are_handed_over_unrounded_with_fresh_moments(tmp_path):
    folder = make_small_model(tmp_path / "m", 16, hidden=64, layers=1, dtype="bfloat16")
    config = dataclasses.replace(
        LearnerConfig(), model=ModelTable(path=folder, compute="float32"), sft=SftTable(steps=3, batch=8, lr=1e-3)
    )
    model = LearnerModel(folder, ALONE, compute="float32")
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions())
    before = {name: value.clone() for name, value in weights.state().items()}
    assert len(start(model, weights, TASK, config, ALONE)) == 3
    state = weights.state()
    assert state.keys() == before.keys(), "no moments"
    for name, value in state.items():
        parameter = model.parameters[name.removeprefix("weights.")]
        assert torch.equal(parameter, value.bfloat16().float())
    assert any(not torch.equal(state[name], before[name]) for name in state)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in state.values()), "finer than published"


def test_a_task_without_demonstrations_is_refused(tmp_path):
    config = dataclasses.replace(LearnerConfig(), sft=SftTable(steps=1))
    plain = load_task("netem.rollouts.long_answers:LongAnswers")
    with pytest.raises(UsageError, match="offers no demonstrations"):
        start(None, None, plain, config, ALONE)


# -- faults


@pytest.mark.parametrize(
    "changes",
    [{"steps": 0}, {"batch": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"warmup_steps": -1}, {"most_tokens": 0},
     {"packing": "loose"}],
)  # fmt: skip
def test_an_option_out_of_range_is_named(changes):
    (name,) = changes
    with pytest.raises(UsageError, match=f"{name} = .* is out of range for a warm start"):
        WarmStartOptions(**{"steps": 1, **changes})


def test_demonstrations_that_end_early_are_an_error():
    few = islice(TASK.demonstrations(0), 20)
    with pytest.raises(UsageError, match="ended after 2 of 5 steps"):
        warmed(small_model(), WarmStartOptions(5, batch=8), few)


@pytest.mark.parametrize(
    ("token_ids", "mask", "why"),
    [
        ([1, 2, 3], [0, 0, 0], "no token to learn"),
        ([1, 2, 3], [1, 0, 0], "no token to learn"),
        ([1, 2, 3], [0, 1], "no token to learn"),
        ([], [], "no token to learn"),
        ([1, 16, 3], [0, 1, 1], "token id 16, and the model has 16"),
    ],
)
def test_a_demonstration_that_fits_no_model_is_refused(token_ids, mask, why):
    one = Demonstration(np.array(token_ids, "<u4"), np.array(mask, "u1"))
    with pytest.raises(UsageError, match=why):
        warmed(small_model(), WarmStartOptions(1, batch=1), iter([one]))


def test_a_gradient_that_is_not_finite_ends_the_warm_start():
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("inf")
    before = bits(model)
    with pytest.raises(LocalError, match="gradient of warm start step 0 is not finite"):
        warmed(model, WarmStartOptions(2, batch=4))
    assert bits(model) == before
