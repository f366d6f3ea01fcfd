"""Acceptance rates of sparse attention, by the dense forward pass of a learner.

Source: Sparrow, section 3.1. The sampler tells its most probable tokens alone, and missing ones count 0, so rates are
never too high. Rates hold for the learner's present weights: its steps since the rollout lower them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from p2pcast.sparse.acceptance_rate import acceptance_rate
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, deal, micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trainer_ranks import TrainerRanks


class AcceptanceRates(NamedTuple):
    """Of tokens of one row. ``schedule``: as of JudgedTokens. ``positions``, ``alphas``: as for
    ``AcceptanceBins.add``.
    """

    schedule: bytes
    positions: np.ndarray
    alphas: np.ndarray


def acceptance_rates(
    model: LearnerModel,
    ranks: TrainerRanks,
    rows: Sequence[TrainingRow],
    most_tokens: int,
    packing: Packing,
    knows: Callable[[bytes], bool],
) -> list[AcceptanceRates]:
    """Of the rows' judged tokens, on all ranks. ``rows``: of all ranks. ``knows``: whether tokens of a schedule count.
    Costs a forward pass of the rows that have any. All ranks call alike.
    """
    found = [(row, judged) for row in rows for judged in row.judged if knows(judged.schedule)]
    if not found:
        return []
    chosen = [_only(row, judged.places) for row, judged in found]
    mine = micro_batches(deal(chosen, ranks.count), ranks.rank, most_tokens, packing)
    rates: list[AcceptanceRates] = []
    for batch in mine:
        numbers = _numbers(batch)
        ids = [found[number][1].ids for number in numbers] or [np.zeros((1, 1), np.int64)]
        width = max(one.shape[1] for one in ids)
        padded = np.concatenate([np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in ids])
        with torch.no_grad():
            dense = model.candidate_logprobs(batch, torch.from_numpy(padded)).cpu().numpy()
        at = 0
        for number in numbers:
            judged = found[number][1]
            end = at + len(judged.places)
            alphas = acceptance_rate(np.exp(dense[at:end, : judged.ids.shape[1]]), np.exp(judged.logprobs))
            # A forward pass that overflows says nothing of the sampler, and must not end the run.
            known = np.isfinite(alphas)
            rates.append(AcceptanceRates(judged.schedule, judged.places[known], alphas[known]))
            at = end
    return [one for part in ranks.gathered(rates) for one in part]


def _only(row: TrainingRow, places: np.ndarray) -> TrainingRow:
    """The row with these places as its targets."""
    targets = np.zeros(row.tokens, bool)
    targets[places] = True
    return replace(row, learnt=targets)


def _numbers(batch: MicroBatch) -> list[int]:
    """Numbers of the rows in the order of their targets; none for an empty micro-batch."""
    return list(dict.fromkeys(batch.rows[batch.learnt].tolist()))
