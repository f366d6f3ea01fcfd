"""Micro-batches: alignment, limits, dealing to ranks, and a tiny model that sees each row as if alone."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from tests.trainer_node.learning.example_rows import row
from tests.trainer_node.learning.tiny_model import logits_of, logprobs_of, loss_and_gradient, tiny_model
from trainer_node.learning.objective.micro_batches import deal, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions, token_weights

PACKINGS = ("packed", "padded")
packings = st.sampled_from(PACKINGS)
lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def some_rows(lengths, **changes):
    return [row(seed, tokens, **changes) for seed, tokens in enumerate(lengths)]


def on_one_rank(rows, packing, most_tokens=10_000):
    return micro_batches(deal(rows, 1), 0, most_tokens, packing)


# -- alignment


def test_packed_by_hand():
    a, b = row(0, 3, learnt=[1, 2], temperature=0.5, single_version=4), row(1, 2, learnt=[1], temperature=2.0)
    (batch,) = on_one_rank([a, b], "packed")
    assert batch.input_ids.tolist() == [[*a.token_ids, *b.token_ids]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.attention_mask is None
    assert batch.logit_positions.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [a.token_ids[1], a.token_ids[2], b.token_ids[1]]
    assert batch.temperatures.tolist() == [0.5, 0.5, 2.0]
    assert batch.single_versions.tolist() == [4, 4, -1]
    assert batch.rows.tolist() == [0, 0, 1]
    assert batch.tokens == 5


def test_padded_by_hand():
    a, b = row(0, 2, learnt=[1]), row(1, 4, learnt=[1, 3])
    (batch,) = on_one_rank([a, b], "padded")
    assert batch.input_ids.tolist() == [[*a.token_ids, 0, 0], b.token_ids.tolist()]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.logit_positions.tolist() == [0, 4, 6]
    assert batch.targets.tolist() == [a.token_ids[1], b.token_ids[1], b.token_ids[3]]
    assert batch.tokens == 6


@given(lengths, packings, st.integers(1, 30), st.integers(1, 4))
def test_each_learnt_token_is_the_target_of_one_entry(lengths, packing, most_tokens, ranks):
    rows = some_rows(lengths)
    dealt = deal(rows, ranks)
    seen = []
    for rank in range(ranks):
        for batch in micro_batches(dealt, rank, most_tokens, packing):
            flat = batch.input_ids.flatten()
            for i in range(len(batch.targets)):
                if not batch.learnt[i]:
                    continue
                at = int(batch.logit_positions[i])
                place = int(batch.position_ids.flatten()[at]) + 1
                source = rows[int(batch.rows[i])]
                assert source.learnt[place]
                assert flat[at + 1] == batch.targets[i] == source.token_ids[place]
                assert flat[at] == source.token_ids[place - 1]
                assert batch.sampler_logprobs[i] == source.logprobs[place]
                assert batch.advantages[i] == source.advantages[place]
                assert batch.versions[i] == source.versions[place]
                assert batch.temperatures[i] == np.float32(source.temperature)
                seen.append((int(batch.rows[i]), place))
    expected = [(number, place) for number, r in enumerate(rows) for place in np.flatnonzero(r.learnt)]
    assert sorted(seen) == expected


# -- limits and ranks


@given(lengths, packings, st.integers(1, 30))
def test_micro_batches_keep_to_the_limit_unless_one_row_is_longer(lengths, packing, most_tokens):
    rows = some_rows(lengths)
    batches = [batch for batch in on_one_rank(rows, packing, most_tokens) if batch.learnt.all()]
    for batch in batches:
        assert batch.input_ids.numel() <= most_tokens or len(set(batch.rows.tolist())) == 1
    numbers = [set(batch.rows.tolist()) for batch in batches]
    assert sum(map(len, numbers)) == len(set().union(*numbers)), "a row is in one micro-batch alone"


def test_packing_fills_micro_batches():
    assert len(on_one_rank(some_rows([6, 5, 4, 3, 2], learnt=[1]), "packed", 10)) == 2
    assert len(on_one_rank(some_rows([5, 5, 2, 2, 2], learnt=[1]), "padded", 10)) == 2


def test_rows_without_a_learnt_token_are_left_out():
    (batch,) = on_one_rank([row(0, 5, learnt=[]), row(1, 4, learnt=[2]), row(2, 1)], "packed")
    assert batch.input_ids.shape == (1, 4)
    assert batch.rows.tolist() == [1]


@given(lengths, st.integers(1, 5))
def test_dealing_balances_tokens_and_loses_no_row(lengths, ranks):
    rows = some_rows(lengths, learnt=[1])
    dealt = deal(rows, ranks)
    assert sorted(number for part in dealt for number, _ in part) == list(range(len(rows)))
    assert all(one is rows[number] for part in dealt for number, one in part)
    assert all(a[0] < b[0] for part in dealt for a, b in pairwise(part))
    loads = [sum(one.tokens for _, one in part if one.learnt_tokens) for part in dealt]
    assert max(loads) - min(loads) <= max(lengths)


def test_dealing_by_hand():
    dealt = deal(some_rows([3, 9, 4, 5], learnt=[1]), 2)
    assert [[number for number, _ in part] for part in dealt] == [[0, 1], [2, 3]]


@given(lengths, packings, st.integers(1, 20), st.integers(1, 5))
def test_ranks_have_equally_many_micro_batches(lengths, packing, most_tokens, ranks):
    dealt = deal(some_rows(lengths), ranks)
    counts = {len(micro_batches(dealt, rank, most_tokens, packing)) for rank in range(ranks)}
    assert len(counts) == 1
    assert counts.pop() >= 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_equal_rows_give_equal_micro_batches(packing):
    first, second = (on_one_rank(some_rows([4, 9, 4, 7, 1]), packing, 12) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_weights_of_rows_reach_their_tokens():
    rows = [row(0, 4, learnt=[1, 3]), row(1, 5, learnt=[]), row(2, 3, learnt=[2])]
    (batch,) = on_one_rank(rows, "packed")
    assert batch.weights(torch.tensor([0.25, 7.0, 0.5])).tolist() == [0.25, 0.25, 0.5]
    (nothing,) = on_one_rank(rows[1:2], "packed")
    assert nothing.weights(torch.tensor([7.0])).tolist() == [0.0]


def test_impossible_arguments_are_refused():
    with pytest.raises(UsageError, match="0 tokens"):
        on_one_rank(some_rows([3]), "packed", 0)
    with pytest.raises(UsageError, match="packed or padded"):
        on_one_rank(some_rows([3]), "sorted")
    with pytest.raises(UsageError, match="0 ranks"):
        deal(some_rows([3]), 0)


# -- a model sees each row as if alone


@pytest.mark.parametrize("packing", PACKINGS)
def test_logits_equal_logits_of_single_rows(packing):
    model, rows = tiny_model(), some_rows([7, 2, 12, 1, 5, 1, 9])
    for one in rows:
        one.learnt[1:] = True
    with torch.no_grad():
        (batch,) = on_one_rank(rows, packing)
        together = logits_of(model, batch)[batch.logit_positions]
        alone = [model(input_ids=torch.tensor(one.token_ids)[None], use_cache=False).logits[0, :-1] for one in rows]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_do_not_leak_into_each_other(packing):
    model, rows = tiny_model(), some_rows([6, 5, 7], learnt=[2, 4])
    embedding = model.get_input_embeddings()
    seen = []
    embedding.register_forward_hook(lambda module, args, output: (output.retain_grad(), seen.append(output))[1])
    (batch,) = on_one_rank(rows, packing)
    logprobs_of(model, batch)[batch.rows == 1].sum().backward()
    reached = seen[0].grad.flatten(0, 1).abs().sum(-1) > 0
    start = 6 if packing == "packed" else 7
    assert reached.nonzero().flatten().tolist() == list(range(start, start + 4)), "row 1, up to its last logits"


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_changed_token_of_the_environment_changes_later_logprobs_alone(packing):
    model, before = tiny_model(), some_rows([8, 8], learnt=[2, 3, 5, 6, 7])
    changed = dataclasses.replace(before[0], token_ids=before[0].token_ids.copy())
    assert not changed.learnt[4]
    changed.token_ids[4] = (changed.token_ids[4] + 1) % 23
    with torch.no_grad():
        first, second = (logprobs_of(model, *on_one_rank(rows, packing)) for rows in (before, [changed, before[1]]))
    # Targets of row 0: places 2 3 5 6 7; then those of row 1.
    assert (first != second).tolist() == [False, False, True, True, True] + [False] * 5


# -- parts add up


@pytest.mark.parametrize("kind", ["clip", "tis"])
@pytest.mark.parametrize("length", ["token", "sequence"])
def test_any_split_has_the_same_loss_and_gradient(kind, length):
    model = tiny_model(torch.float64)
    options = LossOptions(kind=kind, length=length, kl_weight=0.1)
    rows = some_rows([9, 4, 11, 6, 1, 3, 8, 5])
    loss, gradient, statistics = loss_and_gradient(model, options, rows, on_one_rank(rows, "packed"))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    assert norm > 1e-3
    for packing in PACKINGS:
        for ranks, most_tokens in ((1, 1), (1, 12), (2, 20), (3, 10), (12, 20)):
            dealt = deal(rows, ranks)
            parts = [part for rank in range(ranks) for part in micro_batches(dealt, rank, most_tokens, packing)]
            found, split, counted = loss_and_gradient(model, options, rows, parts)
            assert found == pytest.approx(loss, rel=1e-6)
            for name, expected in gradient.items():
                torch.testing.assert_close(split[name], expected, rtol=1e-5, atol=1e-6 * norm)
            assert dataclasses.astuple(counted) == pytest.approx(dataclasses.astuple(statistics), rel=1e-5)


@settings(max_examples=10)
@given(packings)
def test_an_empty_micro_batch_gives_gradients_of_exactly_0_to_all_parameters(packing):
    model, rows = tiny_model(), some_rows([3], learnt=[1])
    _, (empty,) = (micro_batches(deal(rows, 2), rank, 8, packing) for rank in range(2))
    loss, gradient, statistics = loss_and_gradient(model, LossOptions(kl_weight=0.1), rows, [empty])
    assert loss == 0
    assert statistics.tokens == 0
    assert all(not grad.any() for grad in gradient.values())
    assert not token_weights([], "token").numel()
