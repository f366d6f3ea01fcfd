"""Run as a script: ``taught_model.py FOLDER TASK``. The model in FOLDER learns from the task's demonstrations, as the
learner's warm start does. Then samples of one prompt get unlike rewards, which a group needs in order to be trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from p2pcast.tasks.task import demonstrations_of
from p2pcast.tasks.task_loader import load_task
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.warm_start import ALONE, WarmStartOptions, warm_start

OPTIONS = WarmStartOptions(steps=100)


def main(folder: Path, task_name: str) -> None:
    torch.set_num_threads(1)
    model = LearnerModel(folder, ALONE, compute="float32")
    weights = TrainedWeights(model.parameters, model.published, OPTIONS.optimizer())
    shown = demonstrations_of(load_task(task_name), OPTIONS.seed)
    losses = warm_start(model.logprobs, weights, shown, OPTIONS, vocabulary=model.vocabulary)
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}")
    model.module.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
