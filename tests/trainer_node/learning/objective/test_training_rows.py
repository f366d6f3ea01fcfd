"""Rows of a batch: alignment, masks, truncated rollouts, and refusal of all that the ledger would not accept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import IntegrityError, UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.overlong import TREATMENTS
from p2pcast.rollouts.result import Span
from p2pcast.sparse.budget_schedule import ALL_PAGES_NAME
from tests.trainer_node.learning.example_rows import HASH, VOCABULARY, batch, group, result
from trainer_node.learning.objective.micro_batches import deal, micro_batches
from trainer_node.learning.objective.training_rows import MIXED, rows_of
from trainer_node.ledger.batch_cut import CandidateGroup, GroupVerdict, judge


def rows(of, **changes):
    options = {"kind": "dr_grpo", "eps": 0.0, "overlong": "keep", "step": 5, "staleness": 3, "vocabulary": VOCABULARY}
    return rows_of(of, **{**options, **changes})


def one_version(step: int, kv: str = "recompute") -> tuple[Span, ...]:
    return (Span(Version(0, step), 3, 8, HASH, kv),)


def test_row_holds_the_result_token_by_token():
    row, other = rows(batch([(result(), 1.0), (result(), 0.0)]))
    assert row.token_ids.tolist() == [5, 6, 7, 1, 2, 9, 3, 4]
    assert row.learnt.tolist() == [False, False, False, True, True, False, True, True]
    assert row.logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, -0.25, -3]
    assert row.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0, 0.5, 0.5]
    assert row.versions.tolist() == [-1, -1, -1, 3, 3, -1, 4, 4]
    assert (row.temperature, row.group, row.reward, row.truncated) == (1.0, 0, 1.0, False)
    assert (row.tokens, row.learnt_tokens, row.oldest_version) == (8, 4, 3)
    assert other.advantages.tolist() == [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5]
    assert [a.dtype for a in (row.token_ids, row.learnt, row.logprobs, row.advantages, row.versions)] == [
        np.int64,
        np.bool_,
        np.float32,
        np.float32,
        np.int64,
    ]


def test_advantages_compare_the_ledgers_rewards_within_each_group():
    made = rows(batch([(result(), 1.0), (result(), 0.0)], [(result(), 5.0), (result(), 9.0)]))
    assert [row.group for row in made] == [0, 0, 1, 1]
    assert [row.advantages[3] for row in made] == [0.5, -0.5, -2, 2]
    assert [row.reward for row in made] == [1, 0, 5, 9]


def test_tokens_of_the_environment_inside_a_span_have_no_version():
    row, _ = rows(batch([(result(spans=one_version(4)), 1.0), (result(), 0.0)]))
    assert row.versions.tolist() == [-1, -1, -1, 4, 4, -1, 4, 4]


@pytest.mark.parametrize(
    ("spans", "single"),
    [
        (one_version(4), 4),
        (one_version(4, "drain"), 4),
        (one_version(4, "keep"), MIXED),
        (result().spans, MIXED),
        ((Span(Version(0, 4), 3, 5, HASH, "salt"), Span(Version(0, 4), 6, 8, HASH, "salt")), 4),
        ((Span(Version(0, 4), 3, 5, HASH, "salt"), Span(Version(1, 4), 6, 8, HASH, "salt")), MIXED),
    ],
)
def test_single_version_needs_one_version_and_its_own_kv_cache(spans, single):
    row, _ = rows(batch([(result(spans=spans), 1.0), (result(), 0.0)]))
    assert row.single_version == single


def test_loss_mask_restricts_learning_within_the_mask():
    mask = np.array([0, 0, 0, 0, 1, 0, 0, 1], "u1")
    row, _ = rows(batch([(result(loss_mask=mask), 1.0), (result(), 0.0)]))
    assert row.learnt.tolist() == [False] * 4 + [True, False, False, True]
    assert row.advantages.tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0.5]
    assert row.versions.tolist() == [-1, -1, -1, 3, 3, -1, 4, 4]


def test_first_token_of_a_row_is_never_learnt():
    whole = result(
        mask=np.ones(8, "u1"),
        logprobs=np.full(8, -1, "<f4"),
        spans=(Span(Version(0, 4), 0, 8, HASH, "recompute"),),
    )
    row, _ = rows(batch([(whole, 1.0), (result(), 0.0)]))
    assert row.learnt.tolist() == [False] + [True] * 7
    assert row.advantages[0] == 0


@pytest.mark.parametrize(
    ("overlong", "advantages", "learnt"),
    [("keep", [2, -1, -1], [4, 4, 4]), ("mask", [0, -1, -1], [0, 4, 4]), ("zero", [0, 0, 0], [4, 4, 4])],
)
def test_overlong_rollouts(overlong, advantages, learnt):
    long = result(stop="length")
    made = rows(batch([(long, 3.0), (result(), 0.0), (result(), 0.0)]), overlong=overlong)
    assert [row.advantages[3] for row in made] == advantages
    assert [row.learnt_tokens for row in made] == learnt
    assert [row.truncated for row in made] == [True, False, False]
    assert [row.reward for row in made] == [3, 0, 0]


FOREIGN = {"token_ids": np.array([5, 6, 7, 1, 2, 9, 3, VOCABULARY], "<u4")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (FOREIGN, "outside the vocabulary"),
        ({"logprobs": np.array([0, 0, 0, math.nan, -1, 0, -1, -1], "<f4")}, "not finite"),
        ({"logprobs": np.array([0, 0, 0, 0.5, -1, 0, -1, -1], "<f4")}, "above 0"),
        ({"mask": np.zeros(8, "u1")}, "no token was sampled"),
        ({"loss_mask": np.ones(8, "u1")}, "was not sampled"),
        ({"spans": ()}, "outside all spans"),
        ({"spans": one_version(1)}, "sampled at step 1, and results of steps before 2 are stale"),
        ({"temperature": 0.9}, "temperature 0.9, not 1.0"),
        ({"task_hash": bytes([1]) * 32}, "another task"),
    ],
)
def test_a_result_that_the_ledger_would_reject_is_refused_by_job(changes, words):
    bad = result(job=bytes([0xAB]) * 16, **changes)
    with pytest.raises(IntegrityError, match=words) as raised:
        rows(batch([(result(), 1.0), (result(), 0.0)], [(result(), 1.0), (bad, 0.0)]))
    assert "ab" * 16 in str(raised.value)


def test_the_oldest_admissible_step_is_trained():
    assert len(rows(batch([(result(spans=one_version(2)), 1.0), (result(), 0.0)]))) == 2


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(IntegrityError, match="a reward of nan"):
        rows(batch([(result(), math.nan), (result(), 0.0)]))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (group(purpose="evaluate", pinned=Version(0, 4)), "evaluation"),
        (group(temperature=0.5), "temperature 1.0, not 0.5"),
    ],
)
def test_results_of_another_group_are_refused(of, words):
    with pytest.raises(IntegrityError, match=words):
        rows(batch([(result(), 1.0), (result(), 0.0)], of=of))


def test_greedy_results_are_refused():
    greedy = result(temperature=0.0)
    with pytest.raises(IntegrityError, match="greedily"):
        rows(batch([(greedy, 1.0), (greedy, 0.0)], of=group(temperature=0.0)))


def test_a_group_of_one_result_is_refused():
    with pytest.raises(IntegrityError, match=r"07070707.* has 1 results"):
        rows(batch([(result(), 1.0)]))


def test_cut_answer_is_never_paid_more_than_the_worst_whole_one():
    long = result(stop="length")
    made = rows(batch([(long, 5.0), (result(), -1.0), (result(), -3.0)]), overlong="zero")
    paid = [float(row.advantages[row.learnt][0]) for row in made]
    assert paid[0] == paid[2] < paid[1]
    all_cut = rows(batch([(long, 5.0), (long, -1.0)]), overlong="zero")
    assert not any(row.advantages.any() for row in all_cut)


REWARDS = st.sampled_from([-3.0, -1.0, 0.0, 1.0, 5.0])


@given(
    samples=st.lists(st.tuples(REWARDS, st.booleans()), min_size=2, max_size=6),
    overlong=st.sampled_from(TREATMENTS),
)
def test_the_ledger_uses_a_group_if_and_only_if_its_rows_have_advantages(samples, overlong):
    made = rows(
        batch([(result(stop="length" if cut else "end"), reward) for reward, cut in samples]),
        overlong="zero" if overlong == "zero" else "keep",
    )
    candidate = CandidateGroup(
        1, [3] * len(samples), [reward for reward, _ in samples], cut_off=[cut for _, cut in samples]
    )
    used = judge(candidate, 2, overlong) is GroupVerdict.USE
    assert used == any(row.advantages.any() for row in made)


def test_unknown_overlong_treatment_is_refused():
    with pytest.raises(UsageError, match="overlong"):
        rows(batch([(result(), 1.0), (result(), 0.0)]), overlong="drop")


def test_tokens_of_a_schedule_with_all_pages_are_dense():
    """A run without sparse attention publishes that schedule where versions carried another."""
    spans = (Span(Version(0, 3), 3, 5, HASH, "drain"), Span(Version(0, 4), 6, 8, HASH, "drain"))
    turned = result(spans=spans, schedules=[(Version(0, 3), HASH), (Version(0, 4), ALL_PAGES_NAME)])
    dense = result(spans=spans, schedules=[(Version(0, 3), ALL_PAGES_NAME), (Version(0, 4), ALL_PAGES_NAME)])
    row, other = rows(batch([(turned, 1.0), (dense, 0.0)]))
    assert row.sparse.tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert other.sparse is None


def test_tokens_of_sparse_attention_are_marked():
    """A version with a schedule sampled them; tokens of the environment are not marked."""
    spans = (Span(Version(0, 3), 3, 5, HASH, "drain"), Span(Version(0, 4), 6, 8, HASH, "drain"))
    sparse = result(spans=spans, schedules=[(Version(0, 4), HASH)])
    row, other = rows(batch([(sparse, 1.0), (result(), 0.0)]))
    assert row.sparse.tolist() == [False] * 6 + [True] * 2
    assert other.sparse is None
    (part,) = micro_batches(deal([row, other], 1), 0, 100, "packed")
    assert part.sparse.tolist() == [False, False, True, True] + [False] * 4
