"""Run as a script: ``expert_models.py FOLDER KIND STEPS VOCABULARY`` saves a mixture of experts of the zoo's kind in
bfloat16, with more layers and experts. ``STEPS``: of a warm start on the task sums; 0: random weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from model_zoo import KINDS
from transformers import AutoConfig, AutoModelForCausalLM

from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import demonstrations_of
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.warm_start import ALONE, WarmStartOptions, warm_start

DEEP = {"num_hidden_layers": 6, "num_experts": 16, "num_experts_per_tok": 4, "initializer_range": 0.1}
"""Routers of six layers often choose between near ties, and bfloat16 decides."""


def main(folder: Path, kind: str, steps: int, vocabulary: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    family, options = KINDS[kind]
    config = AutoConfig.for_model(family, **{**options, **DEEP, "vocab_size": vocabulary})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    if steps:
        model, chosen = LearnerModel(folder, ALONE, compute="float32"), WarmStartOptions(steps)
        weights = TrainedWeights(model.parameters, model.published, chosen.optimizer())
        shown = demonstrations_of(Sums(), chosen.seed)
        losses = warm_start(model.logprobs, weights, shown, chosen, vocabulary=model.vocabulary)
        print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}")
        model.module.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
