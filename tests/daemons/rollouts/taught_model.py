"""Run as a script: ``taught_model.py FOLDER TASK STEPS``. A small model learns from the task's demonstrations by the
learner's warm start. Then samples of one prompt get unlike rewards, which a group needs in order to be trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from netem.fleet.small_model import make_small_model
from p2pcast.tasks.task import demonstrations_of
from p2pcast.tasks.task_loader import load_task
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.warm_start import ALONE, WarmStartOptions, warm_start


def main(folder: Path, task_name: str, steps: int) -> None:
    torch.set_num_threads(1)
    task, options = load_task(task_name), WarmStartOptions(steps)
    make_small_model(folder, task.vocabulary, dtype="bfloat16")
    model = LearnerModel(folder, ALONE, compute="float32")
    weights = TrainedWeights(model.parameters, model.published, options.optimizer())
    shown = demonstrations_of(task, options.seed)
    losses = warm_start(model.logprobs, weights, shown, options, vocabulary=model.vocabulary)
    print(f"loss {losses[0]:.2f} → {losses[-1]:.2f}")
    model.module.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
