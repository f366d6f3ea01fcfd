"""A small model, trained from random weights, that predicts tokens by their frequencies in its whole text: for
measurements of the adapter of rollouts.

    python -m examples.research.frequency_model FOLDER

Each text draws probabilities of 64 tokens (Dirichlet's distribution), and then its tokens by them, one by one. The last
tokens of a prompt, which sparse attention keeps, have read the whole prompt. So an adapter can learn to use what they
know of the pages that are left out. In texts of task ``recite`` it cannot: there each token needs a place of its own.

FOLDER gets the model and prompts in ``prompts.jsonl``. Promise: equal stages and seeds give equal weights and prompts
on one machine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch

from examples.research.staged_training import Stage, first_model, train_stage
from netem.fleet.small_model import SmallModel, write_model

BEGIN, FIRST, TOKENS = 1, 8, 64
CONCENTRATION: Final = 0.1
"""Of Dirichlet's distribution: a text has about six frequent tokens."""
UNKNOWN: Final = 16
"""First tokens of a text, which nothing tells."""
FORM: Final = SmallModel(
    FIRST + TOKENS, hidden=128, layers=6, head=64, mlp=1, positions=4096, spread=0.06, tied=True, rope_theta=1e6
)
STAGES: Final = (
    Stage(80, 16, 128, 8),
    Stage(60, 8, 256, 16, rate=0.7),
    Stage(60, 4, 512, 32, rate=0.5),
    Stage(60, 4, 512, None, rate=0.3),
    Stage(40, 4, 512, None, rate=0.1),
)
PROMPTS: Final = 4096
PROMPT_TOKENS: Final = 512


def train_frequencies(stages: Sequence[Stage] = STAGES, *, seed: int = 1) -> Any:
    """Returns the model in fp32."""
    torch.manual_seed(seed)
    model, rng = first_model(FORM), np.random.default_rng(seed)
    for number, stage in enumerate(stages):
        train_stage(model, number, stage, partial(texts, rng, stage.batch, stage.tokens), learnt)
    return model


def texts(rng: np.random.Generator, count: int, tokens: int) -> torch.Tensor:
    """Token ids, (count, tokens)."""
    weights = rng.dirichlet(np.full(TOKENS, CONCENTRATION), count)
    drawn = [FIRST + rng.choice(TOKENS, tokens - 1, p=one) for one in weights]
    return torch.from_numpy(np.concatenate([np.full((count, 1), BEGIN), np.stack(drawn)], axis=1))


def learnt(ids: torch.Tensor) -> torch.Tensor:
    """All but the first ones, of shape (texts, tokens - 1)."""
    chosen = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    chosen[:, :UNKNOWN] = False
    return chosen


def write_frequencies(folder: Path, model: Any, *, prompts: int = PROMPTS, seed: int = 2) -> Path:
    write_model(folder, model, dtype="bfloat16")
    drawn = texts(np.random.default_rng(seed), prompts, PROMPT_TOKENS).tolist()
    lines = [json.dumps({"token_ids": one}) for one in drawn]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Train the model of token frequencies, and write it to FOLDER, with prompts."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_frequencies(folder, train_frequencies())


if __name__ == "__main__":
    main()
