"""Rows that sparse attention sampled, and a small model deep enough for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from netem.fleet.small_model import SmallModel, write_small_model
from p2pcast.sparse.budget_schedule import BudgetSchedule
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow
from trainer_node.learning.trainer_ranks import TrainerRanks

VOCABULARY, PAGE = 40, 4
VERSION = 3
SCHEDULE = BudgetSchedule((1,), PAGE, 1000)
"""Four pages of four tokens."""
ALONE = TrainerRanks(0, 1, torch.device("cpu"))


def deep_folder(folder: Path, **changes: Any) -> Path:
    form = SmallModel(VOCABULARY, **{"hidden": 64, "layers": 4, "head": 16, "spread": 0.3} | changes)
    return write_small_model(folder, form, seed=1)


def schedule_of(version: int) -> BudgetSchedule | None:
    return SCHEDULE if version == VERSION else None


def sparse_row(seed: int, prompt: int, answer: int, **changes: Any) -> TrainingRow:
    """``prompt``, ``answer``: numbers of tokens."""
    rng = np.random.default_rng(seed)
    sampled = np.arange(prompt + answer) >= prompt
    fields: dict[str, Any] = {
        "token_ids": rng.integers(3, VOCABULARY, prompt + answer),
        "learnt": sampled,
        "logprobs": np.where(sampled, -3 * rng.random(prompt + answer), 0).astype("f4"),
        "advantages": np.where(sampled, rng.normal(), 0).astype("f4"),
        "temperature": 1.0,
        "versions": np.where(sampled, VERSION, NOT_SAMPLED),
        "group": seed // 2,
        "reward": 0.0,
        "truncated": False,
        "sparse": sampled,
    }
    return TrainingRow(**{**fields, **changes})
