"""Acceptance rates of sparse attention by budget and length, of the small model that looks far back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from p2pcast.sparse.budget_calibration import Calibration
from p2pcast.tasks.trial_tasks.recite import Recite
from rollout_node.sparse_calibration.engine_calibration import calibrated

logger = logging.getLogger("p2pcast.bench")

SEED: Final = 900
"""Of the prompts: unlike those of the training."""
CANDIDATES: Final = 128
"""Most probable tokens of a position: enough for nearly its whole distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookbackOptions:
    """``folder``: of the model, which is trained if the folder is missing. ``lengths``: of the prompts, in tokens.
    ``samples``: prompts of each length. ``asked``: phrases of an answer. ``phrases``: different ones of a prompt.
    ``budgets``: constant ones, in pages of 16 tokens.
    """

    folder: Path
    lengths: Sequence[int]
    samples: int
    asked: int
    phrases: int
    budgets: Sequence[int]
    bin_tokens: int
    block_size: int
    at_once: int


def bench_lookback(options: LookbackOptions) -> Calibration:
    """Raises UsageError for lengths that the task refuses, and LocalError when the engine fails."""
    tasks = [Recite(tokens, options.asked, options.phrases) for tokens in options.lengths]
    prompts = [
        task.drawn(one.prompt).prompt.tolist() for task in tasks for one in islice(task.jobs(SEED), options.samples)
    ]
    if not options.folder.exists():
        # Loads torch.
        from netem.bench.sparse_trials.lookback_model import train_lookback, write_lookback

        logger.info("training a model for %s", options.folder)
        write_lookback(options.folder, train_lookback())
    return calibrated(
        options.folder,
        prompts,
        options.budgets,
        tokens=tasks[0].answer_tokens,
        bin_tokens=options.bin_tokens,
        candidates=CANDIDATES,
        block_size=options.block_size,
        at_once=options.at_once,
    )
