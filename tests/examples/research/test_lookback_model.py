"""The small model that looks far back, in parts. Acceptance rates: tests/rollout_node/vllm/test_sparse_attention.py."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner
from transformers import AutoConfig

from examples.research.lookback_model import Stage, accuracy, learnt, main, train_lookback, write_lookback
from p2pcast.tasks.trial_tasks.recite import BEGIN, FIRST_BODY, FIRST_STARTER, Recite

SHORT = Stage(steps=6, batch=4, tokens=65, window=4)


def test_tokens_after_one_that_stood_before_are_learnt() -> None:
    starter, first, second, other = FIRST_STARTER, FIRST_BODY, FIRST_BODY + 1, FIRST_BODY + 2
    ids = torch.tensor([[BEGIN, starter, first, second, starter, first, other]])
    assert learnt(ids).tolist() == [[False, False, False, False, True, True]]


def test_equal_seeds_train_equal_models_that_other_programs_load(tmp_path: Path) -> None:
    first, again = (train_lookback([SHORT], seed=3) for _ in range(2))
    weights, others = first.state_dict(), again.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert 0 <= accuracy(first, Recite(65), texts=2, seed=9) < 0.5
    config = AutoConfig.from_pretrained(write_lookback(tmp_path / "model", first))
    assert set(config.layer_types) == {"full_attention"}
    assert config.num_hidden_layers == 6


def test_help_trains_nothing() -> None:
    assert "FOLDER" in CliRunner().invoke(main, ["--help"]).output
