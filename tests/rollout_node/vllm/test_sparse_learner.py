"""The learner's sparse forward pass with an adapter, beside a real vLLM engine (CPU build) that decodes with both."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from netem.fleet.small_model import SmallModel, write_small_model
from p2pcast.sparse.budget_schedule import BudgetSchedule
from tests.rollout_node.vllm.test_sparse_attention import LAYERS, PAGE, VOCABULARY, answers, text
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.distillation.sparse_forward import PLAN
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import OptimizerOptions
from trainer_node.learning.trainer_ranks import TrainerRanks

pytestmark = pytest.mark.vllm


@pytest.mark.prove  # tests/trainer_node/learning/distillation/test_sparse_forward.py is the sample
def test_learner_and_engine_agree_on_sparse_tokens_with_an_adapter(tmp_path: Path) -> None:
    folder = write_small_model(tmp_path / "model", SmallModel(VOCABULARY, layers=LAYERS, positions=2048), seed=1)
    model = LearnerModel(folder, TrainerRanks(0, 1, torch.device("cpu")))
    adapter = RolloutAdapter(model, rank=8, alpha=16, options=OptimizerOptions())
    with torch.no_grad():
        for number, p in enumerate(adapter.parameters.values()):
            p.normal_(0, 0.05, generator=torch.Generator().manual_seed(number))
    saved = tmp_path / "phi"
    saved.mkdir()
    words = {name.removeprefix("phi/"): tensor.contiguous() for name, tensor in adapter.published()}
    save_file(words, saved / "adapter_model.safetensors")
    (saved / "adapter_config.json").write_text(json.dumps(dict(adapter.configuration(str(folder)))))

    rng = random.Random(5)
    requests = [[text(rng, length), 40] for length in (700, 300, 60)]
    rounds: list[Any] = [{"schedule": [5], "requests": requests}]
    (found,) = answers(folder, rounds, adapter=saved, enable_lora=True, max_lora_rank=8)["rounds"]
    rows = [TrainingRow.of_answer(prompt, *said) for (prompt, _), said in zip(requests, found, strict=True)]
    (batch,) = micro_batches([list(enumerate(rows))], 0, 1 << 12, "packed")
    options = DistillOptions(LossOptions(), 1 << 12, page_tokens=PAGE)
    distillation = SparseDistillation(model, adapter, options, lambda version: BudgetSchedule((5,)))
    with torch.no_grad():
        with distillation.rolling_out(batch) as plan:
            ours = model.scores(batch, to_attention={PLAN: plan}).logprobs
        with adapter.applied():
            dense = model.logprobs(batch)
        bare = model.logprobs(batch)
    theirs = torch.tensor([value for _, logprobs in found for value in logprobs])
    worst = {
        name: float((one - theirs).abs().max()) for name, one in [("ours", ours), ("dense", dense), ("bare", bare)]
    }
    print(worst)
    assert worst["ours"] < 1e-3
    assert worst["dense"] > 0.05
    assert worst["bare"] > 0.05
