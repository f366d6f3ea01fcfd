"""The small model that looks far back, in parts. Its acceptance rates: tests/rollout_node/vllm/test_lookback.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from netem.bench.lookback_model import Stage, accuracy, first_model, learnt, skipping, train_lookback, write_lookback
from p2pcast.tasks.trial_tasks.recall import FIRST_KEY, FIRST_VALUE, KEYS, VALUES, Recall

SHORT = Stage(steps=8, batch=8, tokens=90, spacing=2, window=2, lr=1.5e-3)


def test_values_of_keys_that_were_stated_before_are_learnt() -> None:
    one = next(Recall(200, 6, 8).demonstrations(1))
    ids, answer = torch.from_numpy(one.token_ids.astype(np.int64))[None], int(one.mask.argmax())
    tokens, seen, wanted = ids[0].tolist(), set[int](), []
    for place, (token, after) in enumerate(pairwise(tokens)):
        key, value = FIRST_KEY <= token < FIRST_KEY + KEYS, FIRST_VALUE <= after < FIRST_VALUE + VALUES
        wanted.append((key and value and token in seen) or place >= answer - 1)
        seen.add(token)
    assert learnt(ids, answer)[0].tolist() == wanted
    assert sum(wanted[: answer - 1]) > 6


def test_positions_skip_between_statements_alone() -> None:
    task = Recall(400, 6, 8)
    tokens = 400 + task.answer_tokens
    found = skipping(task, 4096, (5, tokens), np.random.default_rng(1)).numpy()
    assert found.max() < 4096
    steps = np.diff(found, axis=1)
    assert steps.min() == 1
    skipped = set((np.nonzero(steps > 1)[1] + 1).tolist())
    assert len(skipped) > 10
    assert all(place % task.spacing == 1 for place in skipped)
    assert max(skipped) < 400 - task.asked
    still = skipping(task, 0, (5, tokens), np.random.default_rng(1)).numpy()
    assert (still == np.arange(tokens)).all()


def test_equal_seeds_train_equal_models_that_other_programs_load(tmp_path: Path) -> None:
    first, again = (train_lookback([SHORT], seed=3) for _ in range(2))
    weights, others = first.state_dict(), again.state_dict()
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    torch.manual_seed(3)
    task = Recall(90, 10, 2)
    before, after = (accuracy(model, task, texts=8, seed=9) for model in (first_model(), first))
    assert after.values > before.values
    config = AutoConfig.from_pretrained(write_lookback(tmp_path / "model", first))
    assert set(config.layer_types) == {"full_attention"}
    assert config.num_hidden_layers == 6
