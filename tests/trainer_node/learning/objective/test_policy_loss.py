"""The policy's loss against hand-worked numbers, slow loops, exact gradients, and what masked tokens may not change."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from tests.trainer_node.learning.example_rows import row
from trainer_node.learning.objective.policy_loss import LossOptions, policy_loss, token_weights
from trainer_node.learning.objective.token_scores import scores_of_logits
from trainer_node.learning.objective.token_statistics import TokenStatistics

LN = math.log
F64 = torch.float64


def vector(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def target_logprobs(logits, targets, temperatures):
    return scores_of_logits(logits, targets, temperatures).logprobs


def one_token(options, *, lp=0.0, sampler=0.0, advantage=0.0, old=None, reference=None):
    """The objective of one token of weight 1, and its derivative by ``lp``."""
    learner = vector(lp).requires_grad_()
    loss, statistics = policy_loss(
        options,
        learner,
        vector(sampler),
        vector(advantage),
        vector(1.0),
        old_logprobs=None if old is None else vector(old),
        reference_logprobs=None if reference is None else vector(reference),
    )
    loss.backward()
    return -loss.item(), -learner.grad.item(), statistics


# -- hand-worked numbers

CLIP = LossOptions()
TIS = LossOptions(kind="tis")


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "derivative"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.2, 2.0, 2.4, 2.4),
        (1.5, 2.0, 2.56, 0.0),  # clipped at 1.28
        (0.5, 2.0, 1.0, 1.0),  # below the range, and still worth raising
        (1.0, -2.0, -2.0, -2.0),
        (0.9, -2.0, -1.8, -1.8),
        (0.5, -2.0, -1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, -3.0, -3.0),  # above the range, and still worth lowering
        (3.9, -2.0, -7.8, -7.8),
        (10.0, -2.0, -8.0, 0.0),  # capped at 4
        (10.0, 2.0, 2.56, 0.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip_by_hand(ratio, advantage, objective, derivative):
    found = one_token(CLIP, lp=-1 + LN(ratio), sampler=-1.0, advantage=advantage)
    assert found[:2] == pytest.approx((objective, derivative), abs=1e-12)


def test_log_ratio_limit_by_hand():
    options = LossOptions(ratio_cap=1e12)
    objective, derivative, statistics = one_token(options, lp=-1.0, sampler=-101.0, advantage=-1.0)
    assert (objective, derivative) == (pytest.approx(-math.exp(20)), 0)
    assert statistics.ratio_max == pytest.approx(math.exp(20))
    assert one_token(options, lp=-101.0, sampler=-1.0, advantage=1.0)[:2] == (pytest.approx(math.exp(-20)), 0)
    assert one_token(LossOptions(ratio_cap=1e12, log_ratio_limit=2), lp=-1, sampler=-4, advantage=-1)[0] == (
        pytest.approx(-math.exp(2))
    )


@pytest.mark.parametrize(
    ("importance", "ratio", "advantage", "objective", "derivative"),
    [
        (1.0, 1.0, 2.0, 2.0, 2.0),
        (0.5, 1.2, 2.0, 1.2, 1.2),
        (1.5, 1.5, 2.0, 3.84, 0.0),  # 1.5 * 1.28 * 2
        (3.0, 1.0, 2.0, 4.0, 4.0),  # weight truncated at 2
        (3.0, 0.5, -2.0, -3.2, 0.0),  # 2 * 0.8 * -2
        (3.0, 6.0, -2.0, -24.0, -24.0),  # ratio_cap is for clip alone
    ],
)
def test_tis_by_hand(importance, ratio, advantage, objective, derivative):
    sampler, old = -2.0, -2 + LN(importance)
    found = one_token(TIS, lp=old + LN(ratio), sampler=sampler, old=old, advantage=advantage)
    assert found[:2] == pytest.approx((objective, derivative), abs=1e-12)


def test_kl_by_hand():
    k3 = 2 - LN(2) - 1  # the reference's probability is twice the learner's
    clip = LossOptions(kl_weight=0.5)
    objective, derivative, statistics = one_token(clip, lp=-2.0, sampler=-2.0, advantage=3.0, reference=-2 + LN(2))
    assert objective == pytest.approx(3 - 0.5 * k3)
    assert derivative == pytest.approx(3 + 0.5 * (2 - 1))
    assert statistics.reference_k3 == pytest.approx(k3)
    tis = LossOptions(kind="tis", kl_weight=0.5)
    found = one_token(tis, lp=-2.0, old=-2.0, sampler=-2 - LN(3), advantage=3.0, reference=-2 + LN(2))
    assert found[:2] == pytest.approx((2 * (3 - 0.5 * k3), 2 * (3 + 0.5))), "the truncated weight scales both terms"


def test_kl_of_a_token_far_below_the_reference_is_finite():
    options = LossOptions(kl_weight=1.0)
    assert one_token(options, lp=-200.0, sampler=-200.0, reference=0.0)[:2] == (pytest.approx(21 - math.exp(20)), 0)
    assert one_token(options, lp=0.0, sampler=0.0, reference=-200.0)[:2] == (pytest.approx(-199), -1)


@pytest.mark.parametrize("distance", [1e-2, 1e-3, 1e-4])
def test_small_divergences_survive_float32(distance):
    sampler = torch.tensor([-0.5, -1.0, -2.0])
    _, statistics = policy_loss(
        CLIP, sampler + distance, sampler, torch.zeros(3), torch.ones(3), reference_logprobs=sampler + 2 * distance
    )
    assert statistics.k3 / 3 == pytest.approx(distance**2 / 2, rel=0.01)
    assert statistics.reference_k3 / 3 == pytest.approx(distance**2 / 2, rel=0.01)


# -- slow loops


def slow_token(o, lp, s, a, old, ref):
    """Objective, capped importance, importance, whether the clipped term is the smaller, and k3 of the reference."""
    importance = math.exp(min(max((lp if o.kind == "clip" else old) - s, -20), 20))
    weight = min(importance, o.ratio_cap if o.kind == "clip" else o.tis_cap)
    ratio = weight if o.kind == "clip" else math.exp(min(max(lp - old, -20), 20))
    plain, clipped = ratio * a, min(max(ratio, 1 - o.clip_low), 1 + o.clip_high) * a
    k3 = math.exp(ref - lp) - (ref - lp) - 1
    objective = min(plain, clipped) - o.kl_weight * k3
    return (objective if o.kind == "clip" else weight * objective), weight, importance, clipped < plain, k3


logprob = st.floats(-8, -0.01)
token = st.tuples(
    logprob, logprob, st.floats(-3, 3), logprob, logprob, st.floats(0, 1) | st.just(0.0), st.booleans(),
    st.floats(0, 5), st.booleans(),
)  # fmt: skip
some_options = st.builds(
    LossOptions,
    kind=st.sampled_from(["clip", "tis"]),
    clip_low=st.floats(0, 0.9),
    clip_high=st.floats(0, 2),
    ratio_cap=st.floats(1, 10),
    tis_cap=st.floats(0.5, 10),
    kl_weight=st.floats(0, 2),
)


@given(some_options, st.lists(token, min_size=1, max_size=20))
def test_loss_and_statistics_match_a_slow_loop(options, tokens):
    lp, s, a, old, ref, w, same, entropies, sparse = (list(column) for column in zip(*tokens, strict=True))
    loss, statistics = policy_loss(
        options,
        vector(*lp),
        vector(*s),
        vector(*a),
        vector(*w),
        old_logprobs=vector(*old),
        reference_logprobs=vector(*ref),
        same_version=torch.tensor(same),
        sparse=torch.tensor(sparse),
        entropies=vector(*entropies),
    )
    expected_loss, expected = 0.0, dict.fromkeys((f.name for f in dataclasses.fields(TokenStatistics)), 0.0)
    for i in range(len(tokens)):
        if w[i] == 0:
            continue
        objective, weight, importance, clipped, k3 = slow_token(options, lp[i], s[i], a[i], old[i], ref[i])
        expected_loss -= w[i] * objective
        d = LN(importance)
        expected["tokens"] += 1
        expected["ratio"] += importance
        expected["over_cap"] += importance > (options.ratio_cap if options.kind == "clip" else options.tis_cap)
        expected["clipped"] += clipped
        expected["weight"] += weight
        expected["weight_squared"] += weight**2
        expected["k1"] -= d
        expected["k3"] += math.exp(d) - d - 1
        expected["same_version_tokens"] += same[i]
        expected["same_version_k3"] += (math.exp(d) - d - 1) * same[i]
        expected["reference_tokens"] += 1
        expected["reference_k3"] += k3
        expected["entropy_tokens"] += 1
        expected["entropy"] += entropies[i]
        expected["sparse_tokens"] += sparse[i]
        expected["sparse_weight"] += weight * sparse[i]
        expected["sparse_k3"] += (math.exp(d) - d - 1) * sparse[i]
        expected["ratio_max"] = max(expected["ratio_max"], importance)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-9, abs=1e-9)
    assert dataclasses.asdict(statistics) == pytest.approx(expected, rel=1e-9, abs=1e-9)


# -- gradients


@pytest.mark.parametrize("kind", ["clip", "tis"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_gradients_are_exact(kind, kl_weight):
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    logits = noise(40, 6).requires_grad_()
    targets = torch.arange(40) % 6
    temperatures = 0.5 + torch.rand(40, generator=generator, dtype=F64)
    start = target_logprobs(logits.detach(), targets, temperatures)
    sampler, old, reference = start + noise(40), start + 0.4 * noise(40), start + noise(40)
    advantages, weights = noise(40), torch.rand(40, generator=generator, dtype=F64)
    weights[::7] = 0
    options = LossOptions(kind=kind, kl_weight=kl_weight)

    def loss(logits):
        return policy_loss(
            options,
            target_logprobs(logits, targets, temperatures),
            sampler,
            advantages,
            weights,
            old_logprobs=old,
            reference_logprobs=reference,
        )[0]

    _, statistics = policy_loss(
        options, start, sampler, advantages, weights, old_logprobs=old, reference_logprobs=reference
    )
    assert 0 < statistics.clipped < statistics.tokens, "both sides of the clip are among the tokens"
    assert statistics.over_cap > 0
    assert torch.autograd.gradcheck(loss, logits)


@pytest.mark.parametrize("kind", ["clip", "tis"])
def test_only_the_learners_logprobs_have_a_gradient(kind):
    lp, sampler, advantages, weights, old, reference = (
        torch.full((3,), -1.0 - i / 10, dtype=F64, requires_grad=True) for i in range(6)
    )
    options = LossOptions(kind=kind, kl_weight=0.1)
    loss, _ = policy_loss(options, lp, sampler, advantages, weights, old_logprobs=old, reference_logprobs=reference)
    loss.backward()
    assert lp.grad.abs().min() > 0
    assert [t.grad for t in (sampler, advantages, weights, old, reference)] == [None] * 5


# -- masked tokens

POISON = [0.0, -7.5, 1e30, -1e30, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("kind", ["clip", "tis"])
@pytest.mark.parametrize("poison", POISON)
def test_values_at_masked_places_change_no_bit(kind, poison):
    generator = torch.Generator().manual_seed(5)
    options = LossOptions(kind=kind, kl_weight=0.2)
    clean = [
        torch.randn(32, generator=generator) for _ in range(6)
    ]  # lp, sampler, advantages, old, reference, entropies
    weights = torch.rand(32, generator=generator)
    masked = torch.rand(32, generator=generator) < 0.5
    weights[masked] = 0

    def run(values):
        lp, sampler, advantages, old, reference, entropies = values
        lp = lp.clone().requires_grad_()
        loss, statistics = policy_loss(
            options,
            lp,
            sampler,
            advantages,
            weights,
            old_logprobs=old,
            reference_logprobs=reference,
            same_version=torch.ones(32, dtype=torch.bool),
            sparse=torch.ones(32, dtype=torch.bool),
            entropies=entropies,
        )
        loss.backward()
        return loss.detach(), lp.grad, statistics

    loss, grad, statistics = run(clean)
    assert not grad[masked].any()
    assert grad[~masked].any()
    for changed in [*([i] for i in range(6)), list(range(6))]:
        values = [t.masked_fill(masked, poison) if i in changed else t for i, t in enumerate(clean)]
        found, gradient, counted = run(values)
        assert torch.equal(found, loss)
        assert torch.equal(gradient, grad)
        assert counted == statistics


def test_targets_at_masked_places_change_no_bit_of_the_gradient_by_logits():
    generator = torch.Generator().manual_seed(7)
    logits, weights = torch.randn(16, 9, generator=generator), torch.rand(16, generator=generator)
    sampler, advantages = torch.randn(16, generator=generator) - 2, torch.randn(16, generator=generator)
    weights[::2] = 0
    targets = torch.arange(16) % 9

    def run(targets):
        leaf = logits.clone().requires_grad_()
        lp = target_logprobs(leaf, targets, torch.ones(16))
        loss, _ = policy_loss(LossOptions(), lp, sampler, advantages, weights)
        loss.backward()
        return loss.detach(), leaf.grad

    changed = torch.where(weights == 0, (targets + 4) % 9, targets)
    assert all(map(torch.equal, run(targets), run(changed)))


# -- the divergence from a reference


@pytest.mark.parametrize("seed", range(4))
def test_k3_estimates_the_kl_and_has_the_gradient_of_the_reversed_kl(seed):
    """Each token of the vocabulary, weighted by its probability: the expectation over samples of the learner."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, generator=generator, dtype=F64).requires_grad_()
    reference = torch.log_softmax(torch.randn(7, generator=generator, dtype=F64), -1)
    learner = torch.log_softmax(logits, -1)
    p = learner.detach().exp()
    loss, statistics = policy_loss(
        LossOptions(kl_weight=1.0),
        target_logprobs(logits.expand(7, 7), torch.arange(7), torch.tensor(1.0)),
        learner.detach(),
        torch.zeros(7, dtype=F64),
        p,
        reference_logprobs=reference,
    )
    learner_to_reference = (p * (learner.detach() - reference)).sum()
    torch.testing.assert_close(loss.detach(), learner_to_reference)
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    reference_to_learner = (reference.exp() * (reference - learner)).sum()
    (expected,) = torch.autograd.grad(reference_to_learner, logits)
    torch.testing.assert_close(found, expected)
    assert statistics.reference_tokens == 7


def test_reported_kl_estimates_that_of_the_learner_under_its_samples():
    rng = np.random.default_rng(11)
    learner, reference = (torch.log_softmax(torch.tensor(rng.normal(size=9)), -1) for _ in range(2))
    exact = float((learner.exp() * (learner - reference)).sum())
    drawn = torch.tensor(rng.choice(9, size=40_000, p=learner.exp().numpy()))
    _, statistics = policy_loss(
        LossOptions(),
        learner[drawn],
        learner[drawn],
        torch.zeros(len(drawn), dtype=F64),
        torch.ones(len(drawn), dtype=F64),
        reference_logprobs=reference[drawn],
    )
    assert statistics.document()["kl_reference"] == pytest.approx(exact, rel=0.03)
    assert statistics.document()["kl_sampler"] == 0


# -- weights


def test_token_weights_by_hand():
    rows = [row(0, 6, learnt=[1, 2, 5]), row(1, 4, learnt=[]), row(2, 9, learnt=[3])]
    assert token_weights(rows, "token").tolist() == [1 / 4, 0, 1 / 4]
    assert token_weights(rows, "sequence").tolist() == [1 / 3 / 2, 0, 1 / 2]
    assert token_weights(rows[1:2], "token").tolist() == [0]
    assert token_weights(rows[1:2], "sequence").tolist() == [0]


@pytest.mark.parametrize("length", ["token", "sequence"])
def test_weights_of_all_learnt_tokens_sum_to_1(length):
    rows = [row(seed, 3 + seed) for seed in range(12)]
    weights = token_weights(rows, length)
    total = sum(float(w) * one.learnt_tokens for w, one in zip(weights, rows, strict=True))
    assert total == pytest.approx(1)


# -- statistics


def test_statistics_of_parts_add_up():
    generator = torch.Generator().manual_seed(2)
    lp, sampler, advantages = (torch.randn(30, generator=generator, dtype=F64) for _ in range(3))
    same = torch.rand(30, generator=generator) < 0.3

    def counted(part):
        return policy_loss(
            LossOptions(),
            lp[part],
            sampler[part],
            advantages[part],
            torch.ones(30, dtype=F64)[part],
            reference_logprobs=lp[part] + 0.1,
            same_version=same[part],
            sparse=~same[part],
            entropies=-sampler[part],
        )[1]

    whole, parts = counted(slice(0, 30)), [counted(slice(a, b)) for a, b in ((0, 4), (4, 4), (4, 21), (21, 30))]
    summed = TokenStatistics()
    for part in parts:
        summed = summed.add(part)
    assert dataclasses.astuple(summed) == pytest.approx(dataclasses.astuple(whole))
    over_ranks = TokenStatistics.of(sum(part.sums() for part in parts), max(part.ratio_max for part in parts))
    assert over_ranks == summed


def test_document_by_hand():
    counts = TokenStatistics(
        tokens=4,
        ratio=6,
        over_cap=1,
        clipped=2,
        weight=4,
        weight_squared=8,
        k1=0.4,
        k3=0.8,
        same_version_tokens=2,
        same_version_k3=0.1,
        entropy_tokens=4,
        entropy=3,
        sparse_tokens=1,
        sparse_weight=0.25,
        sparse_k3=0.5,
        ratio_max=5,
    )
    assert counts.document() == {
        "kl_sampler": 0.2,
        "kl_sampler_k1": 0.1,
        "kl_same_version": 0.05,
        "sparse_share": 0.25,
        "kl_sparse": 0.5,
        "weight_sparse": 0.25,
        "weight_dense": 1.25,
        "kl_reference": None,
        "entropy": 0.75,
        "ratio_mean": 1.5,
        "ratio_max": 5,
        "over_cap_share": 0.25,
        "clip_share": 0.5,
        "effective_sample_share": 0.5,
    }
    assert set(TokenStatistics().document().values()) == {None}


# -- refusals


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        (TIS, {}, "start of the step"),
        (LossOptions(kl_weight=0.1), {}, "reference model"),
        (CLIP, {"reference_logprobs": torch.zeros(1)}, r"2 log-probabilities and a tensor of shape \(1,\)"),
    ],
)
def test_missing_or_misshapen_tensors_are_refused(options, given, words):
    two = torch.zeros(2)
    with pytest.raises(UsageError, match=words):
        policy_loss(options, two, two, two, two, **given)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "ppo"},
        {"length": "row"},
        {"clip_low": 1.1},
        {"clip_high": -0.1},
        {"ratio_cap": 0.9},
        {"log_ratio_limit": 100},
        {"tis_cap": 0},
        {"kl_weight": math.nan},
    ],
)
def test_options_out_of_range_are_refused(changes):
    with pytest.raises(UsageError, match=next(iter(changes))):
        LossOptions(**changes)
