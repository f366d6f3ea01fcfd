"""Answers by sparse attention without an engine: a model in this process, many prompts of one length at a time.

Promise: an answer's tokens come from the distribution of an engine that decodes with the schedule, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from p2pcast.sparse.budget_schedule import BudgetSchedule
from trainer_node.learning.distillation.decoding_plan import DecodingPlan
from trainer_node.learning.distillation.sparse_forward import PLAN, sparse_attention


class Answers(NamedTuple):
    """Of B prompts: ``token_ids`` (B, tokens) of the answers; ``logprobs`` (B, tokens, vocabulary), of all tokens that
    could have been sampled.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor


@torch.no_grad()  # type: ignore[untyped-decorator]
def sparse_answers(
    module: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    schedule: BudgetSchedule | None,
    page_tokens: int,
    generator: torch.Generator,
) -> Answers:
    """``prompts``: of equal lengths. ``module``: a causal LM of transformers, at temperature 1. ``schedule`` None:
    dense. An end-of-text token ends no answer.
    """
    ids = torch.tensor(prompts, device=module.device)
    count, length = ids.shape
    said, distributions = [], []
    with sparse_attention(module):
        plan = _token_plan(count, length, None, page_tokens, module.device)
        out = module(input_ids=ids, use_cache=True, logits_to_keep=1, **{PLAN: plan})
        for number in range(tokens):
            distributions.append(out.logits[:, -1].float().log_softmax(-1))
            said.append(torch.multinomial(distributions[-1].exp(), 1, generator=generator))
            plan = _token_plan(count, length + number + 1, schedule, page_tokens, module.device)
            out = module(input_ids=said[-1], past_key_values=out.past_key_values, use_cache=True, **{PLAN: plan})
    return Answers(torch.cat(said, 1), torch.stack(distributions, 1))


def _token_plan(
    sequences: int, tokens: int, schedule: BudgetSchedule | None, page_tokens: int, device: torch.device
) -> DecodingPlan:
    """Of the last token of each of ``sequences`` equally long texts of ``tokens`` tokens, whose other keys are cached.
    ``schedule`` None: dense.
    """
    pages = -(-tokens // page_tokens)
    kept = pages if schedule is None else int(schedule.kept_pages(np.array(tokens - 1), page_tokens))
    rows = torch.arange(sequences if kept < pages else 0, device=device)
    in_text = torch.arange(tokens, device=device) // page_tokens
    page_of = (torch.arange(sequences, device=device)[:, None] * pages + in_text).flatten()
    return DecodingPlan(rows, page_of, rows * pages, torch.full_like(rows, pages), torch.full_like(rows, kept))
