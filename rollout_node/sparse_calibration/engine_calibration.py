"""Calibration of a model by an engine in a child process: vLLM's CPU build starts none where numba was loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from p2pcast.errors import LocalError, UsageError
from p2pcast.sparse.budget_calibration import Calibration
from rollout_node.sparse_calibration.calibration_run import CalibrationOrder

LAST_CHARACTERS: Final = 2000
"""Of the engine's messages, in an error."""


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
    command = [sys.executable, "-m", "rollout_node.sparse_calibration.calibration_run"]
    done = subprocess.run(
        command,
        input=order.to_json(),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"},
    )
    if done.returncode:
        raise LocalError(f"the engine ended with {done.returncode}: {done.stderr[-LAST_CHARACTERS:]}")
    for rollout in json.loads(done.stdout.strip().splitlines()[-1]):
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
