"""The small model that looks far back, in parts. Acceptance rates: tests/rollout_node/vllm/test_sparse_attention.py."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from netem.bench.lookback_model import Stage, accuracy, predictable, train_lookback, write_lookback
from p2pcast.tasks.trial_tasks.recite import BEGIN, FIRST_BODY, FIRST_STARTER, Recite

SHORT = Stage(steps=6, batch=4, tokens=66, window=4)


def test_body_tokens_that_stood_before_are_predictable() -> None:
    starter, first, second = FIRST_STARTER, FIRST_BODY, FIRST_BODY + 1
    ids = torch.tensor([[BEGIN, starter, first, second, starter, first, second]])
    assert predictable(ids).tolist() == [[False, False, False, False, True, True]]


def test_equal_seeds_train_equal_models_that_other_programs_load(tmp_path: Path) -> None:
    first, again = (train_lookback([SHORT], seed=3) for _ in range(2))
    weights, others = first.state_dict(), again.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert 0 <= accuracy(first, Recite(66), texts=2, seed=9) < 0.5
    config = AutoConfig.from_pretrained(write_lookback(tmp_path / "model", first))
    assert set(config.layer_types) == {"full_attention"}
    assert config.num_hidden_layers == 6
