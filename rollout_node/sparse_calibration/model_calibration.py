"""Calibrates a model with an engine on this machine: prompts from a file, and the acceptance rates of each budget.
Plotting these rates needs matplotlib, from the extra ``lab``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from p2pcast.ground.errors import UsageError
from p2pcast.inspection import png_figure
from p2pcast.sparse.budget_calibration import Calibration
from rollout_node.sparse_calibration.calibration_run import CalibrationOrder
from rollout_node.sparse_calibration.engine_process import run_engine


def prompts_of_file(file: Path) -> list[str | list[int]]:
    """Read prompts from JSON lines, each with ``text`` or ``token_ids``. Returns texts and lists of token ids, none of
    them empty. Raises UsageError that names the line.
    """
    found: list[str | list[int]] = []
    # ``splitlines`` also splits at separators that JSON allows unescaped in a text, such as U+2028.
    lines = file.read_text(errors="replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], 1):
        try:
            body = json.loads(line)
            key = "token_ids" if "token_ids" in body else "text"
            one = body[key]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{file}, line {number}: no JSON document with text or token_ids") from None
        ids = isinstance(one, list) and all(type(token) is int and token >= 0 for token in one)
        if not one or not (isinstance(one, str) if key == "text" else ids):
            raise UsageError(
                f"{file}, line {number}: text is a text, token_ids a list of whole numbers; neither is empty"
            )
        found.append(one)
    if not found:
        raise UsageError(f"{file} has no prompt")
    return found


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
    """Run the calibration. Raises UsageError for unsuitable arguments, LocalError if the engine fails."""
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


def plot_percentiles(found: Calibration, target: float, file: Path) -> None:
    """Plot acceptance rates by position, with one line per budget. Raises LocalError."""
    figure, ((axis,),) = png_figure.blank(1, 1, width=8, height=5)
    rows = [row for row in found.rows() if row.percentile is not None]
    for pages in found.budgets:
        line = [(row.number * found.bin_tokens, row.percentile) for row in rows if row.pages == pages]
        if line:
            axis.plot(*zip(*line, strict=True), marker="o", label=str(found.constant(pages).budget_tokens(0)))
    axis.axhline(target, color="black", linestyle=":")
    axis.set_xlabel("position, tokens")
    axis.set_ylabel("5th percentile of the acceptance rate")
    axis.legend(title="budget, tokens")
    png_figure.save(figure, file)


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
