"""A small model, trained from random weights, that looks far back: of task ``recite``, for measurements of sparse
attention.

    python -m netem.bench.lookback_model FOLDER

Sparse attention keeps layers 0 and 1 dense. So the look-back has to happen in later layers: layers 0 and 1 are trained
with a narrow window, which is opened at the end. Texts grow by stages. In each, all tokens are learnt that are not
chance, of texts as well as of answers: induction heads (Olsson et al., 2022) form on short texts.

Promise: equal stages and seeds give equal weights on one machine.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from netem.bench.orthogonal_steps import OrthogonalSteps
from netem.rollouts.small_model import SmallModel, write_model
from p2pcast.tasks.trial_tasks.recite import FIRST_BODY, STARTERS, VOCABULARY, Recite

logger = logging.getLogger("p2pcast.bench")

LONGEST: Final = 16384
FORM: Final = SmallModel(
    VOCABULARY, hidden=128, layers=6, head=64, mlp=1, positions=LONGEST, spread=0.06, tied=True, rope_theta=1e8
)
LOCAL_LAYERS: Final = 2
"""Layers with a window: those that sparse attention keeps dense."""
WARMUP_STEPS: Final = 10
LOG_EVERY: Final = 10


class Stage(NamedTuple):
    """``batch``: texts of a step. ``tokens``: of a prompt. ``window``: tokens that layers 0 and 1 see; None: all.
    ``phrases``: most different ones of a text. ``rate``: factor of the learning rates.
    """

    steps: int
    batch: int
    tokens: int
    window: int | None
    phrases: int = STARTERS
    rate: float = 1.0


STAGES: Final = (
    Stage(60, 12, 65, 4, phrases=2),
    Stage(180, 8, 161, 4),
    Stage(60, 4, 512, 32, rate=0.5),
    Stage(24, 1, 2048, 64, rate=0.25),
    Stage(10, 1, 2048, None, rate=0.25),
    Stage(45, 4, 512, None, rate=0.5),
    Stage(60, 2, 2048, None, rate=0.5),
    Stage(30, 2, 2048, None, rate=0.2),
    Stage(16, 1, 4096, None, rate=0.2),
    Stage(8, 1, 8192, None, rate=0.1),
    Stage(60, 2, 2048, None, rate=0.2),
    Stage(60, 2, 2048, None, rate=0.05),
    Stage(20, 2, 2048, None, rate=0.02),
)
MATRIX_RATE: Final = 0.02
OTHER_RATE: Final = 3e-3
"""Of embeddings and norms."""


def train_lookback(stages: Sequence[Stage] = STAGES, *, seed: int = 1) -> Any:
    """Returns the model in fp32."""
    torch.manual_seed(seed)
    model = first_model()
    for number, stage in enumerate(stages):
        texts = _texts(Recite(stage.tokens, phrases=stage.phrases), seed + number)
        matrices, others = _optimizers(model)
        began = time.monotonic()
        for step in range(stage.steps):
            ids = _batch(texts, stage.batch)
            scores = _scores(model, ids[:, :-1], stage.window)
            loss = torch.nn.functional.cross_entropy(*(x[learnt(ids)] for x in (scores, ids[:, 1:])))
            loss.backward()
            rate = stage.rate * min(1.0, (step + 1) / WARMUP_STEPS)
            for group in others.param_groups:
                group["lr"] = OTHER_RATE * rate
            matrices.step(MATRIX_RATE * rate)
            others.step()
            model.zero_grad()
            if step % LOG_EVERY == LOG_EVERY - 1 or step == stage.steps - 1:
                logger.info(
                    "stage %d, step %d of %d: loss %.3f, right %.3f; %.0f s",
                    number, step + 1, stage.steps, loss.item(), _right(scores, ids), time.monotonic() - began,
                )  # fmt: skip
    return model


def first_model() -> Qwen3ForCausalLM:
    """The model before training, drawn from torch's random state. The outputs of layers start small, by their number
    (Radford et al., 2019, section 2.3).
    """
    model = FORM.made("bfloat16")
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight.mul_((2 * FORM.layers) ** -0.5)
    return model


def _optimizers(model: Qwen3ForCausalLM) -> tuple[OrthogonalSteps, torch.optim.Optimizer]:
    """For the matrices of layers, and for embeddings and norms."""
    layers = [one for one in model.model.layers.parameters() if one.ndim == 2]
    rest = [one for name, one in model.named_parameters() if one.ndim == 1 or "embed" in name]
    return OrthogonalSteps(layers), torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)


def accuracy(model: Qwen3ForCausalLM, task: Recite, *, texts: int, seed: int) -> float:
    """Share of the body tokens of ``texts`` new texts and answers that are the most probable ones, with dense attention
    in all layers. Tokens whose text tells nothing of them are left out.
    """
    drawn = _texts(task, seed)
    with torch.inference_mode():
        batches = [_batch(drawn, 1) for _ in range(texts)]
        return float(np.mean([_right(_scores(model, ids[:, :-1], None), ids) for ids in batches]))


def write_lookback(folder: Path, model: Qwen3ForCausalLM) -> Path:
    return write_model(folder, model, dtype="bfloat16")


def learnt(ids: torch.Tensor) -> torch.Tensor:
    """Tokens whose predecessor stood in their text before: the others are chance. Of shape (texts, tokens - 1): without
    the first token of a text.
    """
    again = np.ones(tuple(ids.shape), bool)
    for row, found in zip(ids.numpy(), again, strict=True):
        found[np.unique(row, return_index=True)[1]] = False
    return torch.from_numpy(again)[:, :-1]


def _texts(task: Recite, seed: int) -> Iterator[np.ndarray]:
    for one in task.demonstrations(seed):
        yield one.token_ids.astype(np.int64)


def _batch(texts: Iterator[np.ndarray], count: int) -> torch.Tensor:
    """Token ids, of shape (count, tokens)."""
    return torch.from_numpy(np.stack(list(islice(texts, count))))


def _scores(model: Qwen3ForCausalLM, ids: torch.Tensor, window: int | None) -> torch.Tensor:
    """Logits of the next tokens, of shape (texts, tokens, vocabulary)."""
    kinds = ["full_attention"] * FORM.layers
    masks: dict[str, torch.Tensor | None] = {"full_attention": None}
    if window is not None:
        kinds[:LOCAL_LAYERS] = ["sliding_attention"] * LOCAL_LAYERS
        back = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        masks["sliding_attention"] = ((back >= 0) & (back < window))[None, None]
    kept, model.config.layer_types = model.config.layer_types, kinds
    try:
        found = model(input_ids=ids, attention_mask=masks, use_cache=False)
    finally:
        model.config.layer_types = kept
    logits: torch.Tensor = found.logits
    return logits


def _right(scores: torch.Tensor, ids: torch.Tensor) -> float:
    chosen = learnt(ids) & (ids >= FIRST_BODY)[:, 1:]
    return float((scores.argmax(-1) == ids[:, 1:])[chosen].float().mean())


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    model = train_lookback()
    logger.info("trained in %.0f s", time.monotonic() - began)
    for tokens in (512, 2048, 4096, 8192):
        logger.info("%d tokens: right %.3f", tokens, accuracy(model, Recite(tokens), texts=4, seed=99))
    write_lookback(Path(sys.argv[1]), model)


if __name__ == "__main__":
    main()
