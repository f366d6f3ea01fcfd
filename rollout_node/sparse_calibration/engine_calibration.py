"""Calibration of a model by an engine on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_calibration import Calibration
from rollout_node.sparse_calibration.calibration_run import CalibrationOrder
from rollout_node.sparse_calibration.engine_process import run_engine


def calibrated(
    model: Path,
    prompts: Sequence[str | Sequence[int]],
    budgets: Sequence[int],
    *,
    tokens: int,
    bin_tokens: int,
    candidates: int,
    block_size: int,
    at_once: int,
) -> Calibration:
    """Raises UsageError for arguments that do not fit the model, and LocalError when the engine fails."""
    found = Calibration(budgets, bin_tokens=bin_tokens)
    ids = _token_ids(model, prompts)
    order = CalibrationOrder(
        model=str(model),
        prompts=ids,
        budgets={pages: found.constant(pages).document() for pages in budgets},
        tokens=tokens,
        candidates=candidates,
        block_size=block_size,
        longest=max(map(len, ids)) + tokens + 1,
        at_once=at_once,
    )
    for rollout in run_engine("rollout_node.sparse_calibration.calibration_run", asdict(order)):
        found.add(rollout["pages"], np.array(rollout["positions"], np.int64), np.array(rollout["alphas"]))
    return found


def _token_ids(model: Path, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [list(map(int, prompt)) for prompt in prompts]
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UsageError(f"{model} has no tokenizer for prompts in text: {error}") from None
    return [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
