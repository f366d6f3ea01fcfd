"""The adapter of rollouts, and its updates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcast.ground.errors import UsageError
from tests.trainer_node.learning.distillation.sparse_rows import ALONE, PAGE, deep_folder, schedule_of, sparse_row
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation, divergence
from trainer_node.learning.distillation.sparse_forward import PLAN
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.objective.micro_batches import MicroBatch, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights

LOSS = LossOptions(kind="tis")
ROWS = [sparse_row(1, 30, 41), sparse_row(2, 3, 60), sparse_row(3, 20, 25), sparse_row(4, 5, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_folder(tmp_path_factory.mktemp("deep") / "model")


def distillation(model: LearnerModel, *, lr: float = 1e-2, rank: int = 4, **options: Any) -> SparseDistillation:
    adapter = RolloutAdapter(model, rank=rank, alpha=16, options=OptimizerOptions(lr=lr), seed=3)
    return SparseDistillation(model, adapter, DistillOptions(LOSS, 96, page_tokens=PAGE, **options), schedule_of)


def one_batch(rows: list[TrainingRow]) -> MicroBatch:
    (found,) = micro_batches([list(enumerate(rows))], 0, 1 << 12, "packed")
    return found


def rolled_out(found: SparseDistillation, model: LearnerModel, batch: MicroBatch) -> torch.Tensor:
    with torch.no_grad(), found.rolling_out(batch) as plan:
        return model.scores(batch, to_attention={PLAN: plan}).logprobs


def policy_after(folder: Path, *, distils: bool, masters: Any = "fp32") -> dict[str, torch.Tensor]:
    model = LearnerModel(folder, ALONE)
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions(lr=1e-3, masters=masters))
    policy = LearnerStep(model, weights, StepOptions(LOSS, 96, minibatches=2), ALONE)
    phi = distillation(model) if distils else None
    for step in range(3):
        policy.train(ROWS, step, lambda: None)
        if phi is not None:
            phi.train(ROWS, step, lambda: None)
    return {name: value.clone() for name, value in weights.state().items()}


def test_an_adapter_changes_no_bit_of_the_policy_s_updates(folder: Path) -> None:
    plain, beside = (policy_after(folder, distils=distils) for distils in (False, True))
    assert plain.keys() == beside.keys()
    assert all(torch.equal(plain[name], beside[name]) for name in plain)


def test_an_adapter_is_0_at_first_and_leaves_no_trace_outside(folder: Path) -> None:
    model, batch = LearnerModel(folder, ALONE), one_batch(ROWS)
    with torch.no_grad():
        dense = model.logprobs(batch)
    found = distillation(model)
    first = rolled_out(found, model, batch)
    found.train(ROWS, 0, lambda: None)
    assert (rolled_out(found, model, batch) - first).abs().max() > 1e-3
    with torch.no_grad():
        assert torch.equal(model.logprobs(batch), dense)
    assert all(p.requires_grad and p.grad is None for p in model.parameters.values())


def test_an_adapter_adds_the_product_of_its_matrices(folder: Path) -> None:
    """Beside a model whose weights hold the product already."""
    model, batch = LearnerModel(folder, ALONE), one_batch(ROWS)
    adapter = RolloutAdapter(model, rank=4, alpha=16, options=OptimizerOptions())
    assert {name.split(".")[-3] for name in adapter.parameters} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    with torch.no_grad():
        for number, p in enumerate(adapter.parameters.values()):
            p.normal_(0, 0.05, generator=torch.Generator().manual_seed(number))
        with adapter.applied():
            beside = model.logprobs(batch)
        for name, a in adapter.parameters.items():
            if name.endswith("lora_A.weight"):
                place = name.removesuffix("lora_A.weight")
                model.parameters[f"{place}weight"] += 16 / 4 * adapter.parameters[f"{place}lora_B.weight"] @ a
        merged = model.logprobs(batch)
    assert torch.allclose(beside, merged, atol=1e-4)


def test_gradients_equal_the_loss_as_written(folder: Path) -> None:
    """One micro-batch or several; by the formula of the module's text, over the whole vocabulary."""
    model = LearnerModel(folder, ALONE)
    found = distillation(model, kl_weight=0.3, ppo_weight=0.7, candidates=1 << 20)
    with torch.no_grad():
        for number, p in enumerate(found.adapter.parameters.values()):
            p.normal_(0, 0.05, generator=torch.Generator().manual_seed(number))
    batch = one_batch(ROWS)
    with torch.no_grad():
        d = model.logprobs(batch)
        p = model._logits(batch, None).log_softmax(-1)
    with found.rolling_out(batch) as plan:
        q = model._logits(batch, {PLAN: plan}).log_softmax(-1)
        said = q.gather(-1, batch.targets[:, None])[:, 0]
        w = (said - batch.sampler_logprobs).exp().clamp(max=LOSS.tis_cap).detach()
        objective = w * 0.7 * (said - said.detach()).exp() * batch.advantages
        loss = (0.3 * (p.exp() * (p - q)).sum(-1) - objective).mean()
        expected = torch.autograd.grad(loss, list(found.adapter.parameters.values()))
    said, loss = said.detach(), loss.detach()
    k3 = (d - said).exp() - (d - said) - 1
    seen: list[torch.Tensor] = []
    weights = found.adapter.weights
    update = weights.update

    def watched(step: int) -> float:
        seen.extend(master.grad.clone() for master in weights._masters.values() if master.grad is not None)
        return update(step)

    weights.update = watched  # type: ignore[method-assign]
    report = found.train(ROWS, 0, lambda: None)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, seen, strict=True))
    assert report.kl == pytest.approx(float(k3.mean()), rel=1e-4)
    assert report.acceptance == pytest.approx(float((d - said).exp().clamp(max=1).mean()), rel=1e-4)
    assert report.loss == pytest.approx(float(loss), abs=1e-5)
    assert report.shortened > 50


def test_tokens_beside_the_candidates_count_as_one() -> None:
    p, q = torch.tensor([[0.6, 0.3], [0.5, 0.25]]), torch.tensor([[0.2, 0.2], [0.5, 0.4]])
    expected = [
        sum(a * math.log(a / b) for a, b in zip(*pair, strict=True))
        for pair in (((0.6, 0.3, 0.1), (0.2, 0.2, 0.6)), ((0.5, 0.25, 0.25), (0.5, 0.4, 0.1)))
    ]
    assert float(divergence(p.log(), q.log(), torch.tensor([1.0, 0.5]))) == pytest.approx(expected[0] + expected[1] / 2)


def test_tokens_that_cannot_be_sampled_or_are_not_learnt_add_nothing() -> None:
    sparse = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log().requires_grad_()
    dense = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    found = divergence(dense, sparse, torch.tensor([1.0, 0.0]))
    found.backward()
    assert float(found.detach()) == pytest.approx(math.log(2), abs=1e-3)
    assert sparse.grad is not None
    assert sparse.grad.isfinite().all()
    assert sparse.grad[1].tolist() == [0.0, 0.0]


def test_distillation_alone_brings_sparse_attention_nearer_to_dense(folder: Path) -> None:
    model = LearnerModel(folder, ALONE)
    found = distillation(model, kl_weight=1.0, ppo_weight=0.0, lr=3e-3)
    reports = [found.train(ROWS, step, lambda: None) for step in range(25)]
    assert reports[-1].kl < 0.5 * reports[0].kl
    assert reports[-1].acceptance > reports[0].acceptance


def test_published_words_are_peft_s_file(folder: Path) -> None:
    model = LearnerModel(folder, ALONE)
    adapter = distillation(model).adapter
    named = dict(adapter.published())
    place = "phi/base_model.model.model.layers.3.mlp.down_proj"
    assert named[f"{place}.lora_A.weight"].shape == (4, 192)
    assert named[f"{place}.lora_B.weight"].shape == (64, 4)
    assert len(named) == len(adapter.parameters) == 2 * 7 * 4
    settings = adapter.configuration("base")
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 16, "LORA")
    assert settings["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_an_adapter_of_bfloat16_computes_with_its_published_words(tmp_path: Path) -> None:
    folder = deep_folder(tmp_path / "model")
    LearnerModel(folder, ALONE).module.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    model = LearnerModel(tmp_path / "bf16", ALONE, compute="float32")
    found = distillation(model)
    found.train(ROWS, 0, lambda: None)
    for (name, words), computed in zip(found.adapter.published(), found.adapter.parameters.values(), strict=True):
        assert words.dtype == torch.bfloat16, name
        assert computed.dtype == torch.float32
        assert torch.equal(words.float(), computed.detach())


def test_a_sharded_model_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LearnerModel(folder, ALONE)
    monkeypatch.setattr(LearnerModel, "sharded", True)
    with pytest.raises(UsageError, match="trains on one rank alone"):
        distillation(model)
