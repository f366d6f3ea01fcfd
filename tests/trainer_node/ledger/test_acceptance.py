"""Every ground on which a result is rejected, and that no other result is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, job_of
from p2pcast.rollouts.result import Result, Span
from p2pcast.rollouts.routed_experts import ExpertShape, RoutedExperts
from trainer_node.ledger.acceptance import Reason, Standards, rejection
from trainer_node.ledger.lineage import Lineage

TASK = bytes(range(32))
MANIFESTS = {Version(branch, step): bytes([branch, step] * 16) for branch in (0, 1) for step in range(20)}
"""Branch 1 began at 0.6: 0.7 and later are dead."""
LINEAGE = Lineage(0, {}).forked(1, 6)
OWN, OTHER = b"s" * 32, b"o" * 32
"""Names of schedules of sparse attention."""
SCHEDULES = {Version(1, 9): OWN, Version(1, 10): OWN}
"""Version 1.8 carries none."""


NEWEST = Version(1, 8)


def job(oldest=NEWEST, **changes):
    fields = {
        "id": bytes(16), "size": 2, "purpose": "train", "task": "sums", "task_hash": TASK, "prompt": b"1+1=", "seed": 1,
        "temperature": 1.0, "max_tokens": 8,
    }  # fmt: skip
    return job_of(Group(**{**fields, **changes}), 0, bytes(16), oldest)


def result(*versions: Version, **changes):
    spans = tuple(Span(v, i, i + 1, MANIFESTS.get(v, bytes(32)), "keep") for i, v in enumerate(versions))
    count = len(versions)
    fields = {
        "job": bytes(16), "lease": bytes(16), "task_hash": TASK, "token_ids": np.arange(count, dtype="<u4"),
        "mask": np.ones(count, "u1"), "logprobs": np.full(count, -1, "<f4"), "spans": spans, "temperature": 1.0,
        "reward": 0.0, "stop": "end",
    }  # fmt: skip
    return Result(**{**fields, **changes})


def standards(rule="bounded", learner_step=10, staleness=3, experts=None):
    return Standards(rule, staleness, 100, learner_step, LINEAGE, MANIFESTS, SCHEDULES, experts)


def verdict(made, of=None, by=None, *, settled=False, in_time=True):
    found = rejection(made, of or job(), by or standards(), settled=settled, in_time=in_time)
    return found and found.reason


def test_fresh_results_of_live_versions_are_accepted_even_late():
    assert verdict(result(Version(1, 10))) is None
    assert verdict(result(Version(1, 7), Version(1, 10))) is None
    assert verdict(result(Version(1, 7)), in_time=False) is None
    assert verdict(result(Version(0, 6)), by=standards(learner_step=8)) is None, "an ancestor"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (result(Version(1, 6)), Reason.STALE),
        (result(Version(1, 10), Version(1, 6)), Reason.STALE),
        (result(Version(0, 9)), Reason.DEAD),
        (result(Version(1, 9), Version(0, 7)), Reason.DEAD),
        (result(Version(1, 30)), Reason.UNKNOWN),
        (result(Version(1, 10), task_hash=bytes(32)), Reason.FORGED),
        (result(Version(1, 10), temperature=0.5), Reason.FORGED),
        (result(Version(1, 10), spans=(Span(Version(1, 10), 0, 1, bytes(32), "keep"),)), Reason.FORGED),
        (result(Version(1, 10), spans=()), Reason.UNVERSIONED),
        (result(Version(1, 10), logprobs=np.array([np.nan], "<f4")), Reason.MALFORMED),
        (result(Version(1, 10), token_ids=np.array([100], "<u4")), Reason.MALFORMED),
    ],
)
def test_grounds_of_rejection(made, reason):
    assert verdict(made) is reason
    assert verdict(made, settled=True) is (reason if reason.blames else Reason.DUPLICATE)


def schedules(**names):
    """``v9=OWN``: a claim that version 1.9 sampled by this schedule."""
    return [(Version(1, int(text[1:])), name) for text, name in names.items()]


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        (None, None),
        (schedules(v9=OWN), None),
        (schedules(v10=OWN), None),
        (schedules(v9=OWN, v10=OWN), None),
        (schedules(v8=OWN), Reason.FORGED),
        (schedules(v10=OTHER), Reason.FORGED),
        (schedules(v9=OWN, v10=OTHER), Reason.FORGED),
        (schedules(v8=OWN, v9=OWN, v10=OWN), Reason.FORGED),
    ],
)
def test_sparse_attention_is_claimed_by_the_versions_own_schedule_alone(claimed, reason):
    """Engines without sparse attention claim none, and may serve some of a play's versions."""
    made = result(Version(1, 8), Version(1, 9), Version(1, 10), schedules=claimed)
    assert verdict(made) is reason
    if reason is not None:
        assert verdict(made, settled=True) is reason


def test_claim_of_an_unknown_version_waits_for_knowledge_of_the_version():
    assert verdict(result(Version(1, 30), schedules=schedules(v30=OWN))) is Reason.UNKNOWN


def test_claim_of_a_version_without_tokens_is_no_way_around():
    assert verdict(result(Version(1, 8), schedules=schedules(v9=OWN))) is Reason.MALFORMED


def test_a_second_result_is_a_duplicate():
    assert verdict(result(Version(1, 10)), settled=True) is Reason.DUPLICATE


def test_strict_results_are_of_the_one_version_and_in_time():
    strict = standards("strict")
    assert verdict(result(Version(1, 8)), by=strict) is None
    assert verdict(result(Version(1, 8)), by=strict, in_time=False) is Reason.LATE
    assert verdict(result(Version(1, 9)), by=strict) is Reason.STALE
    assert verdict(result(Version(1, 8), Version(1, 9)), by=strict) is Reason.STALE


def test_evaluation_takes_the_pinned_version_at_any_staleness():
    evaluation = job(purpose="evaluate", pinned=Version(1, 2))
    assert verdict(result(Version(1, 2)), evaluation) is None
    assert verdict(result(Version(1, 3)), evaluation) is Reason.STALE
    assert verdict(result(Version(1, 2)), evaluation, in_time=False) is None


def test_only_malformed_and_forged_results_are_held_against_a_worker():
    assert {reason for reason in Reason if reason.blames} == {Reason.MALFORMED, Reason.FORGED}


@given(
    st.lists(st.builds(Version, st.integers(0, 1), st.integers(0, 19)), min_size=1, max_size=4),
    st.integers(6, 25),
    st.integers(0, 6),
)
def test_accepted_results_are_never_staler_than_the_bound(versions, learner_step, staleness):
    by = standards(learner_step=learner_step, staleness=staleness)
    if verdict(result(*versions), by=by) is None:
        assert all(LINEAGE.is_live(v) for v in versions)
        assert learner_step - min(v.step for v in versions) <= staleness
    else:
        assert not all(LINEAGE.is_live(v) for v in versions) or learner_step - min(v.step for v in versions) > staleness


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (None, None),
        (ExpertShape(2, 2, 8), None),
        (ExpertShape(2, 2, 7), Reason.MALFORMED),
        (ExpertShape(1, 2, 8), Reason.MALFORMED),
        (ExpertShape(2, 4, 8), Reason.MALFORMED),
    ],
)
def test_experts_of_another_model_are_malformed(shape, reason):
    made = result(Version(1, 10), Version(1, 10), routed_experts=RoutedExperts(2, 2, 1, ((0, 1),), bytes([0, 1, 3, 7])))
    assert verdict(made, by=standards(experts=shape)) is reason


def test_repeated_experts_are_malformed_for_every_model():
    made = result(Version(1, 10), routed_experts=RoutedExperts(1, 2, 1, ((0, 1),), bytes([3, 3])))
    assert verdict(made) is Reason.MALFORMED
