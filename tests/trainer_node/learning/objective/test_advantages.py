"""Advantages against hand-worked numbers and slow sums."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from trainer_node.learning.objective.advantages import group_advantages

KINDS = ("grpo", "dr_grpo", "leave_one_out")
rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


def test_hand_worked_group():
    group = [1.0, 0.0, 0.0, 1.0, 3.0]  # mean 1, squares of distances 0 1 1 0 4, population variance 6/5
    assert group_advantages(group, "dr_grpo", 0) == pytest.approx([0, -1, -1, 0, 2])
    assert group_advantages(group, "grpo", 0) == pytest.approx(np.array([0, -1, -1, 0, 2]) / math.sqrt(1.2))
    assert group_advantages(group, "grpo", 0.5) == pytest.approx(np.array([0, -1, -1, 0, 2]) / (math.sqrt(1.2) + 0.5))
    assert group_advantages(group, "leave_one_out", 0) == pytest.approx([0, -1.25, -1.25, 0, 2.5])


def test_a_pair_has_opposite_advantages():
    assert group_advantages([1, 0], "grpo", 0).tolist() == [1, -1]
    assert group_advantages([1, 0], "dr_grpo", 0).tolist() == [0.5, -0.5]
    assert group_advantages([1, 0], "leave_one_out", 0).tolist() == [1, -1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e9, 1 / 3])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_have_advantages_of_exactly_0(kind, reward, eps):
    assert group_advantages([reward] * 7, kind, eps).tolist() == [0.0] * 7


@given(rewards, st.sampled_from(KINDS), st.floats(1e-3, 1))
def test_advantages_match_exact_sums(group, kind, eps):
    exact = [Fraction(reward) for reward in group]
    mean = sum(exact) / len(exact)
    expected = []
    for i, reward in enumerate(exact):
        others = exact[:i] + exact[i + 1 :]
        match kind:
            case "grpo":
                expected.append(float(reward - mean) / (statistics.pstdev(group) + eps))
            case "dr_grpo":
                expected.append(float(reward - mean))
            case _:
                expected.append(float(reward - sum(others) / len(others)))
    assert group_advantages(group, kind, eps) == pytest.approx(expected, abs=1e-10)


@given(rewards, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_a_permutation_of_rewards_permutes_advantages_bit_for_bit(group, kind, random):
    order = list(range(len(group)))
    random.shuffle(order)
    before = group_advantages(group, kind, 1e-4)
    after = group_advantages([group[i] for i in order], kind, 1e-4)
    assert after.tolist() == before[order].tolist()


@pytest.mark.parametrize(
    ("group", "kind", "eps", "words"),
    [
        ([1.0], "grpo", 0, "at least 2"),
        ([[1.0, 0.0]], "grpo", 0, "shape"),
        ([1.0, math.nan], "grpo", 0, "a reward of nan"),
        ([1.0, math.inf], "dr_grpo", 0, "a reward of inf"),
        ([1.0, 0.0], "ppo", 0, "leave_one_out"),
        ([1.0, 0.0], "grpo", -1, "eps"),
        ([1.0, 0.0], "grpo", math.nan, "eps"),
    ],
)
def test_undefined_advantages_are_refused(group, kind, eps, words):
    with pytest.raises(UsageError, match=words):
        group_advantages(group, kind, eps)


@pytest.mark.parametrize("reward", [1.7e308, -1.7e308, 1.1e9])
def test_huge_reward_is_refused_by_its_bound(reward):
    with pytest.raises(UsageError, match=r"rewards are from -1e\+09 to 1e\+09"):
        group_advantages([reward, reward, 0.0], "grpo", 1e-4)
