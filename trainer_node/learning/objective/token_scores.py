"""Scores of targets, or of several candidates: log-probability, and the entropy of the distribution from which a policy
would sample.

With x the logits of a position divided by its temperature, p = softmax(x): the score of token y is log p[y], and the
entropy is -sum(p * log p), in nats. Softmax in float32, whatever the dtype of the logits; float64 stays.

Guarantee: positions are scored in chunks, so no tensor of positions x vocabulary exists beside the given ones, neither
in the forward nor in the backward pass. Values and gradients are those of all positions together, up to the order of
sums. Entropies have no gradient. No I/O, clock or randomness.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

CHUNK_LOGITS: Final = 1 << 26
"""Most logits of a chunk: 256 MiB in float32, of which a few exist at once. 440 positions at a vocabulary of 152 000:
enough rows of a matrix product that reading the head's weights once a chunk costs little.
"""


class TokenScores(NamedTuple):
    """``logprobs`` (M,), with a gradient. ``entropies`` (M,), without."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


class Candidates(NamedTuple):
    """``ids`` (M, K) of tokens, and their ``logprobs`` (M, K), without a gradient."""

    ids: torch.Tensor
    logprobs: torch.Tensor


def scores_of_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenScores:
    """Scores of ``targets`` (M,) by the logits ``hidden @ weight.T + bias``, which never exist whole. ``hidden`` (M,
    H), ``weight`` (V, H), ``bias`` (V,) or None, ``temperatures`` (M,) or one for all.
    """
    return _scores(hidden, weight, bias, targets, temperatures, chunk_logits)


def scores_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *, chunk_logits: int = CHUNK_LOGITS
) -> TokenScores:
    """Scores of ``targets`` (M,) by ``logits`` (M, V), which exist once, and once more as their gradient."""
    return _scores(logits, None, None, targets, temperatures, chunk_logits)


def candidate_logprobs(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    candidates: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> torch.Tensor:
    """Log-probabilities of ``candidates`` (M, K), token ids at each position, with a gradient. ``rows``: hidden states
    (M, H), or without ``weight`` logits (M, V); the rest as of ``scores_of_hidden``.
    """
    given = temperatures.detach().expand(candidates.shape[:1])
    logprobs: torch.Tensor = _Scores.apply(rows, weight, bias, candidates, given, _chunk(rows, weight, chunk_logits))[0]
    return logprobs


def most_probable(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    count: int,
    temperatures: torch.Tensor,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> Candidates:
    """Each position's target, and after it the ``count`` most probable tokens, or all of a smaller vocabulary; the rest
    as above.
    """
    given = temperatures.expand(targets.shape)
    ids, logprobs = [targets.new_empty(0, 1)], [torch.empty(0, 1, dtype=_exact(rows.dtype), device=rows.device)]
    with torch.no_grad():
        for part in _parts(len(targets), _chunk(rows, weight, chunk_logits)):
            log_p = _log_softmax(_logits(rows[part], weight, bias), given[part])
            most = log_p.topk(min(count, log_p.shape[-1]), -1).indices
            ids.append(torch.cat([targets[part].unsqueeze(-1), most], -1))
            logprobs.append(log_p.gather(-1, ids[-1]))
    return Candidates(*(torch.cat(parts[1:] or parts) for parts in (ids, logprobs)))


def _chunk(rows: torch.Tensor, weight: torch.Tensor | None, chunk_logits: int) -> int:
    """Positions of a chunk."""
    vocabulary: int = rows.shape[-1] if weight is None else weight.shape[0]
    return max(1, chunk_logits // vocabulary)


def _scores(
    rows: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    chunk_logits: int,
) -> TokenScores:
    given = temperatures.detach().expand(targets.shape)
    logprobs, entropies = _Scores.apply(
        rows, weight, bias, targets.unsqueeze(-1), given, _chunk(rows, weight, chunk_logits)
    )
    return TokenScores(logprobs.squeeze(-1), entropies)


class _Scores(torch.autograd.Function):  # type: ignore[misc]
    """Of ``candidates`` (M, K). The backward pass computes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        candidates: torch.Tensor,
        temperatures: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(rows, weight, bias, candidates, temperatures)
        ctx.chunk = chunk
        dtype = _exact(rows.dtype)
        logprobs = torch.empty(candidates.shape, dtype=dtype, device=rows.device)
        entropies = torch.empty(candidates.shape[:1], dtype=dtype, device=rows.device)
        for part in _parts(len(candidates), chunk):
            log_p = _log_softmax(_logits(rows[part], weight, bias), temperatures[part])
            logprobs[part] = log_p.gather(-1, candidates[part])
            # A token that cannot be sampled has the logarithm -inf, and adds nothing.
            entropies[part] = -log_p.exp().mul_(log_p.clamp_(min=torch.finfo(dtype).min)).sum(-1)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, bias, candidates, temperatures = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        rows_gradient = torch.empty_like(rows) if of_rows else None
        # Chunks add up in float32: sums in bfloat16 would lose the smaller ones.
        weight_sum = torch.zeros_like(weight, dtype=_exact(weight.dtype)) if of_weight else None
        bias_sum = torch.zeros_like(bias, dtype=_exact(bias.dtype)) if of_bias else None
        for part in _parts(len(candidates), ctx.chunk):
            logits = _logits(rows[part], weight, bias)
            # By x: the gradient of a candidate, times 1 at the candidate and less p everywhere.
            of_logits = _log_softmax(logits, temperatures[part]).exp_().mul_(-gradient[part].sum(-1, keepdim=True))
            of_logits.scatter_add_(-1, candidates[part], gradient[part])
            of_logits = of_logits.div_(temperatures[part].to(of_logits).unsqueeze(-1)).to(logits.dtype)
            if rows_gradient is not None:
                rows_gradient[part] = of_logits if weight is None else of_logits @ weight
            if weight_sum is not None:
                weight_sum += of_logits.T @ rows[part]
            if bias_sum is not None:
                bias_sum += of_logits.sum(0)
        return (
            rows_gradient,
            None if weight_sum is None else weight_sum.to(weight.dtype),
            None if bias_sum is None else bias_sum.to(bias.dtype),
            None,
            None,
            None,
        )


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(first, min(first + chunk, count)) for first in range(0, count, chunk))


def _logits(rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    return rows if weight is None else torch.nn.functional.linear(rows, weight, bias)


def _log_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    exact = logits.to(_exact(logits.dtype))
    return torch.log_softmax(exact / temperatures.to(exact).unsqueeze(-1), dim=-1)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
