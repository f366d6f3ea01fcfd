"""Probe sets and their scores: every value of another machine is refused or read whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, MAX_SEQUENCES, ProbeSet, packed_scores, unpacked_scores

SEQUENCES = st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=40), min_size=1, max_size=8)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(SEQUENCES)
def test_any_set_of_tokens_is_read_and_named_by_its_tokens(sequences: list[list[int]]) -> None:
    found = ProbeSet.checked(sequences, 100)
    assert [list(sequence) for sequence in found.sequences] == sequences
    assert len(found.id) == 16
    assert found.id == ProbeSet.checked(sequences).id
    assert found.scores == sum(len(sequence) - 1 for sequence in sequences)
    changed = [*sequences[:-1], [*sequences[-1][:-1], 100 + sequences[-1][-1]]]
    assert ProbeSet.checked(changed).id != found.id
    assert ProbeSet.checked([*sequences, [1, 2]]).id != found.id


@given(ANYTHING)
def test_values_of_any_form_are_refused_or_whole(document: Any) -> None:
    try:
        found = ProbeSet.checked(document)
    except UsageError:
        return
    assert [list(sequence) for sequence in found.sequences] == document


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [[1, 2]] * (MAX_SEQUENCES + 1),
        [[1] * (MAX_PROBE_TOKENS + 1)],
        [[1] * MAX_PROBE_TOKENS, [1, 2]],
        [[1]],
        [[1, -1]],
        [[1, 50]],
        [[1, True]],
        [[1, 2.0]],
    ],
)
def test_sets_beyond_the_limits_are_refused(sequences: Any) -> None:
    with pytest.raises(UsageError):
        ProbeSet.checked(sequences, 50)


@given(st.lists(st.lists(st.floats(-9000.0, 0.0, width=32), min_size=1, max_size=9), min_size=1, max_size=5))
def test_scores_survive_their_packing(scores: list[list[float]]) -> None:
    packed = packed_scores([np.array(row, "<f4") for row in scores])
    assert unpacked_scores(packed).tolist() == [value for row in scores for value in row]


@given(st.binary(max_size=40))
def test_scores_of_any_bytes_are_refused_or_log_probabilities(packed: bytes) -> None:
    try:
        found = unpacked_scores(packed)
    except RemoteError:
        return
    assert np.isfinite(found).all()
    assert (found <= 1e-4).all()
