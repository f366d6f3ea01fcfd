"""The typical size for which plans are made, version after version."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.broadcast_time import TYPICAL_PAYLOAD_BYTES
from topology.version_sizes import COUNTED, SMALLEST, VersionSizes, of_steps

MIB = 1 << 20


def planned(*deltas: int) -> list[int]:
    sizes = VersionSizes()
    found = []
    for delta in deltas:
        sizes.published(delta)
        found.append(sizes.bytes)
    return found


def test_before_anything_is_known_an_8b_models_delta_is_taken_and_then_a_share_of_the_state() -> None:
    sizes = VersionSizes()
    assert sizes.bytes == TYPICAL_PAYLOAD_BYTES == 64 * MIB
    sizes.state(16_381_470_720)
    assert sizes.bytes == 64 * MIB
    sizes.state(16 * MIB)
    assert sizes.bytes == SMALLEST


def test_the_first_delta_says_more_than_the_state_and_later_states_say_nothing() -> None:
    sizes = VersionSizes()
    sizes.state(1 << 30)
    assert sizes.bytes == 4 * MIB
    assert sizes.published(33 * MIB)
    assert sizes.bytes == 32 * MIB
    sizes.state(1 << 40)
    assert sizes.bytes == 32 * MIB


@pytest.mark.parametrize("large", [1 << 34, 20])
def test_two_that_stand_out_change_nothing_and_three_do(large: int) -> None:
    usual = [8 * MIB] * COUNTED
    assert planned(*usual, large, large)[-1] == 8 * MIB
    assert planned(*usual, large, large, large)[-1] == max(large, SMALLEST)


@given(st.lists(st.integers(9 * MIB // 2, 8 * MIB), min_size=1, max_size=30))
def test_sizes_that_wobble_by_less_than_two_are_one_size(deltas: list[int]) -> None:
    """After the first size, at most one further change follows."""
    assert sum(a != b for a, b in pairwise(planned(*deltas))) <= 1


@given(st.lists(st.integers(0, 1 << 36), max_size=40))
def test_the_size_is_a_power_of_two_near_the_median(deltas: list[int]) -> None:
    sizes = VersionSizes()
    for n, delta in enumerate(deltas, 1):
        before = sizes.bytes
        assert sizes.published(delta) == (sizes.bytes != before)
        newest = sorted(deltas[max(0, n - COUNTED) : n])
        middle = max(newest[(len(newest) - 1) // 2], SMALLEST)
        assert sizes.bytes.bit_count() == 1
        assert sizes.bytes / 2 < middle < sizes.bytes * 2


def test_stored_steps_count_and_their_squashes_do_not() -> None:
    stored = [((0, n), (0, n + 1), 100 + n) for n in range(9)] + [((0, 4), (0, 8), 999), ((0, 0), (0, 9), 999)]
    assert of_steps(reversed(stored)) == [104, 105, 106, 107, 108]
    assert of_steps([((0, 9), (1, 5), 7), ((0, 5), (1, 5), 70)]) == [7], "a branch begins at the newest version"
    assert of_steps([]) == []


def test_a_restarted_hub_takes_up_the_same_size() -> None:
    deltas = [3 * MIB, 9 * MIB, 8 * MIB, 7 * MIB, 8 * MIB, 8 * MIB]
    anew = VersionSizes()
    anew.published(*of_steps(((0, n), (0, n + 1), size) for n, size in enumerate(deltas)))
    assert anew.bytes == planned(*deltas)[-1]
