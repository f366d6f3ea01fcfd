"""The small model of token frequencies, in parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from click.testing import CliRunner
from transformers import AutoConfig

from examples.research.distill import token_ids_of_file
from examples.research.frequency_model import (
    BEGIN,
    FIRST,
    TOKENS,
    UNKNOWN,
    learnt,
    main,
    texts,
    train_frequencies,
    write_frequencies,
)
from examples.research.staged_training import Stage

SHORT = Stage(steps=6, batch=4, tokens=64, window=4)


def test_texts_have_few_frequent_tokens_of_their_own() -> None:
    found = texts(np.random.default_rng(3), 20, 512).numpy()
    assert (found[:, 0] == BEGIN).all()
    assert found[:, 1:].min() >= FIRST
    assert found.max() < FIRST + TOKENS
    frequent = [set(np.argsort(np.bincount(row, minlength=FIRST + TOKENS))[-3:].tolist()) for row in found]
    shares = [float(np.isin(row, list(most)).mean()) for row, most in zip(found, frequent, strict=True)]
    assert min(shares) > 0.3
    assert len(set.union(*frequent)) > 20
    assert learnt(torch.from_numpy(found)).sum() == 20 * (511 - UNKNOWN)


def test_equal_seeds_train_equal_models_with_prompts(tmp_path: Path) -> None:
    first, again = (train_frequencies([SHORT], seed=3) for _ in range(2))
    weights, others = first.state_dict(), again.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    folders = [write_frequencies(tmp_path / name, first, prompts=4) for name in ("one", "two")]
    assert AutoConfig.from_pretrained(folders[0]).num_hidden_layers == 6
    one, two = (token_ids_of_file(folder / "prompts.jsonl") for folder in folders)
    assert one == two
    assert {len(prompt) for prompt in one} == {512}


def test_help_trains_nothing() -> None:
    assert "FOLDER" in CliRunner().invoke(main, ["--help"]).output
