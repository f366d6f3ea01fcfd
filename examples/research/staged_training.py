"""Training of a small model from random weights, by stages of growing texts, for measurements of sparse attention.

Sparse attention keeps layers 0 and 1 dense. So the look-back has to happen in later layers: layers 0 and 1 are trained
with a narrow window, which is opened at the end.

Promise: equal models, stages and texts give equal weights on one machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from transformers import Qwen3ForCausalLM

from netem.fleet.small_model import SmallModel

logger = logging.getLogger("p2pcast.bench")

LOCAL_LAYERS: Final = 2
"""Layers with a window: those that sparse attention keeps dense."""
WARMUP_STEPS: Final = 10
LOG_EVERY: Final = 10
MATRIX_RATE: Final = 0.02
OTHER_RATE: Final = 3e-3
"""Of embeddings and norms."""


class Stage(NamedTuple):
    """``batch``: texts of a step. ``tokens``: of a text or prompt. ``window``: tokens that layers 0 and 1 see; None:
    all. ``rate``: factor of the learning rates.
    """

    steps: int
    batch: int
    tokens: int
    window: int | None
    rate: float = 1.0


def first_model(form: SmallModel) -> Qwen3ForCausalLM:
    """The model before training, drawn from torch's random state. The outputs of layers start small, by their number
    (Radford et al., 2019, section 2.3).
    """
    model = form.made("bfloat16")
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.mul_((2 * form.layers) ** -0.5)
    return model


def train_stage(
    model: Qwen3ForCausalLM,
    number: int,
    stage: Stage,
    batch: Callable[[], torch.Tensor],
    learnt: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """``batch``: token ids of the next texts, (texts, tokens). ``learnt``: of these, which next tokens count, (texts,
    tokens - 1) bool.
    """
    matrices, others = _optimizers(model)
    began = time.monotonic()
    for step in range(stage.steps):
        ids = batch()
        scores = next_scores(model, ids[:, :-1], stage.window)
        chosen = learnt(ids)
        loss = torch.nn.functional.cross_entropy(scores[chosen], ids[:, 1:][chosen])
        loss.backward()
        rate = stage.rate * min(1.0, (step + 1) / WARMUP_STEPS)
        for group in others.param_groups:
            group["lr"] = OTHER_RATE * rate
        matrices.step(MATRIX_RATE * rate)
        others.step()
        model.zero_grad()
        if step % LOG_EVERY == LOG_EVERY - 1 or step == stage.steps - 1:
            seconds = time.monotonic() - began
            logger.info("stage %d, step %d of %d: loss %.3f; %.0f s", number, step + 1, stage.steps, loss, seconds)


def next_scores(model: Qwen3ForCausalLM, ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Logits of the next tokens, of shape (texts, tokens, vocabulary)."""
    kinds = ["full_attention"] * model.config.num_hidden_layers
    masks: dict[str, torch.Tensor | None] = {"full_attention": None}
    if window is not None:
        kinds[:LOCAL_LAYERS] = ["sliding_attention"] * LOCAL_LAYERS
        back = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        masks["sliding_attention"] = ((back >= 0) & (back < window))[None, None]
    kept, model.config.layer_types = model.config.layer_types, kinds
    try:
        found: Any = model(input_ids=ids, attention_mask=masks, use_cache=False)
    finally:
        model.config.layer_types = kept
    logits: torch.Tensor = found.logits
    return logits


def _optimizers(model: Qwen3ForCausalLM) -> tuple[OrthogonalSteps, torch.optim.Optimizer]:
    """For the matrices of layers, and for embeddings and norms."""
    layers = [one for one in model.model.layers.parameters() if one.ndim == 2]
    rest = [one for name, one in model.named_parameters() if one.ndim == 1 or "embed" in name]
    return OrthogonalSteps(layers), torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)


# -- the optimiser Muon

MOMENTUM: Final = 0.95
_ROUNDS: Final = 5
_POWERS: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, as in the authors' text."""


class OrthogonalSteps:
    """The optimiser Muon (Jordan et al., 2024), in fp32: torch has it in bfloat16, which old CPUs compute slowly.

    ``matrices``: of two dimensions. Matrices of equal shape are computed at once.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for one in matrices:
            shapes.setdefault(one.shape, []).append(one)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in shapes.items()]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, rate: float) -> None:
        """``rate``: spectral norm of a step of a wide or square matrix, about."""
        for group, momentum in self._groups:
            slopes = torch.stack([one.grad for one in group if one.grad is not None])
            momentum.lerp_(slopes, 1 - MOMENTUM)
            rows, columns = group[0].shape
            steps = orthogonal(slopes.lerp(momentum, MOMENTUM)) * (rate * max(1.0, rows / columns) ** 0.5)
            for one, change in zip(group, steps, strict=True):
                one.sub_(change)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """``matrices``, of shape (count, rows, columns), with singular values of about 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    found = found / (found.norm(dim=(1, 2), keepdim=True) + 1e-7)
    first, third, fifth = _POWERS
    for _ in range(_ROUNDS):
        square = found @ found.mT
        found = first * found + (third * square + fifth * square @ square) @ found
    return found.mT if tall else found
