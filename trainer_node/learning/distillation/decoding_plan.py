"""Which positions of a micro-batch an engine decoded with fewer pages than there were, and how many it kept. Pure.

A position is decoded if its own token was sampled, and the next one too. The first token of an answer comes from its
prompt's pass, which is dense; the last token of a turn is read with the next prompt. Source: Sparrow, section 3.2, as
engines compute (``rollout_node.vllm_plugin.sparse_attention``).

Guarantee: positions within their budget, prompts, padding and tokens of versions without a schedule are not in a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from p2pcast.sparse.budget_schedule import LAST_PAGES, BudgetSchedule
from trainer_node.learning.objective.micro_batches import MicroBatch

ScheduleOf = Callable[[int], BudgetSchedule | None]
"""From a version's step to the schedule that its engines followed; None: they were dense."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodingPlan:
    """Of B sequences with T keys and the queries of all of them, or of the last ones, for all layers.

    ``places`` (S,) int64: of the flattened queries, those with fewer pages. ``page_of`` (B * T,) int64: number of each
    key's page among the pages of all sequences. ``first`` (S,) int64: the first page of a place's row. ``pages``,
    ``kept`` (S,) int64: pages that hold earlier tokens and the place itself, and those it attends to.
    """

    places: torch.Tensor
    page_of: torch.Tensor
    first: torch.Tensor
    pages: torch.Tensor
    kept: torch.Tensor

    @property
    def most_kept(self) -> int:
        return int(self.kept.max()) if self.kept.numel() else 0


def decoding_plan(batch: MicroBatch, schedule_of: ScheduleOf, page_tokens: int, device: torch.device) -> DecodingPlan:
    """``page_tokens``: tokens of a page of the engines' caches. Raises what ``schedule_of`` raises."""
    positions = batch.position_ids.flatten().numpy()
    versions = batch.sparse_versions.flatten().numpy()
    pages = positions // page_tokens + 1
    kept = pages.copy()
    for version in np.unique(versions[versions >= 0]).tolist():
        schedule = schedule_of(version)
        if schedule is not None:
            made = versions == version
            kept[made] = schedule.kept_pages(positions[made], page_tokens)
    (places,) = np.nonzero(kept < pages)
    page_of = np.cumsum(positions % page_tokens == 0) - 1
    first = page_of[places] - positions[places] // page_tokens
    found = (places, page_of, first, pages[places], kept[places])
    return DecodingPlan(*(torch.from_numpy(one.astype(np.int64)).to(device) for one in found))


def chosen_pages(plan: DecodingPlan, scores: torch.Tensor) -> torch.Tensor:
    """Which pages each place attends to, (S, P) bool: the first of its row, the last two, and those with the best
    scores. ``scores`` (S, P): of full pages.
    """
    numbers = torch.arange(scores.shape[1], device=scores.device) - plan.first[:, None]
    there = (numbers >= 0) & (numbers < plan.pages[:, None])
    always = there & ((numbers == 0) | (numbers >= plan.pages[:, None] - LAST_PAGES))
    ranked = torch.nan_to_num(scores).masked_fill(always, torch.inf).masked_fill(~there, -torch.inf)
    best = ranked.topk(min(plan.most_kept, scores.shape[1]), dim=1).indices
    counted = torch.arange(best.shape[1], device=scores.device) < plan.kept[:, None]
    return torch.zeros_like(there).scatter_(1, best, counted)
