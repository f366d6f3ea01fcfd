"""A small model, trained from random weights, that looks far back: of task ``recite``, for measurements of sparse
attention.

    python -m examples.research.lookback_model FOLDER

Texts grow by stages. In each, all tokens are learnt that are not chance, of texts as well as of answers: induction
heads (Olsson et al., 2022) form on short texts.

Promise: equal stages and seeds give equal weights on one machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from examples.research.staged_training import Stage, first_model, next_scores, train_stage
from netem.fleet.small_model import SmallModel, write_model
from p2pcast.tasks.trial_tasks.recite import FIRST_BODY, VOCABULARY, Recite

logger = logging.getLogger("p2pcast.bench")

LONGEST: Final = 16384
FORM: Final = SmallModel(
    VOCABULARY, hidden=128, layers=6, head=64, mlp=1, positions=LONGEST, spread=0.06, tied=True, rope_theta=1e8
)
STAGES: Final = (
    Stage(60, 12, 65, 4),
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


def train_lookback(stages: Sequence[Stage] = STAGES, *, seed: int = 1) -> Any:
    """Returns the model in fp32."""
    torch.manual_seed(seed)
    model = first_model(FORM)
    for number, stage in enumerate(stages):
        drawn = _texts(Recite(stage.tokens), seed + number)
        train_stage(model, number, stage, partial(_batch, drawn, stage.batch), learnt)
    return model


def accuracy(model: Qwen3ForCausalLM, task: Recite, *, texts: int, seed: int) -> float:
    """Share of the body tokens of ``texts`` new texts and answers that are the most probable ones, with dense attention
    in all layers. Tokens whose text tells nothing of them are left out.
    """
    drawn = _texts(task, seed)
    with torch.inference_mode():
        batches = [_batch(drawn, 1) for _ in range(texts)]
        return float(np.mean([_right(next_scores(model, ids[:, :-1], None), ids) for ids in batches]))


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


def _right(scores: torch.Tensor, ids: torch.Tensor) -> float:
    chosen = learnt(ids) & (ids >= FIRST_BODY)[:, 1:]
    return float((scores.argmax(-1) == ids[:, 1:])[chosen].float().mean())


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Train the model that looks far back, and write it to FOLDER."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    model = train_lookback()
    logger.info("trained in %.0f s", time.monotonic() - began)
    for tokens in (512, 2048, 4096, 8192):
        logger.info("%d tokens: right %.3f", tokens, accuracy(model, Recite(tokens), texts=4, seed=99))
    write_lookback(folder, model)


if __name__ == "__main__":
    main()
