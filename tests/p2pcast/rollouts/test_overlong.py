"""The pay of truncated rollouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.overlong import TREATMENTS, overlong_of, paid

GROUPS = st.lists(st.tuples(st.floats(-1e9, 1e9), st.booleans()), max_size=8)


@pytest.mark.parametrize(
    ("rewards", "cut_off", "figures"),
    [
        ([3.0, 0.0, 1.0], [True, False, False], [0.0, 0.0, 1.0]),
        ([5.0, -1.0, -3.0], [True, False, False], [-3.0, -1.0, -3.0]),
        ([-5.0, 1.0, 2.0], [True, False, False], [0.0, 1.0, 2.0]),
        ([5.0, -1.0], [True, True], [0.0, 0.0]),
        ([1.0, 1.0], [False, False], [1.0, 1.0]),
        ([], [], []),
    ],
)
def test_zero_pays_a_cut_answer_nothing_or_as_the_worst_whole_one(
    rewards: list[float], cut_off: list[bool], figures: list[float]
) -> None:
    assert paid(rewards, cut_off, "zero") == figures


@given(group=GROUPS)
def test_no_cut_answer_is_paid_more_than_a_whole_answer(
    group: list[tuple[float, bool]],
) -> None:
    rewards, cut_off = [reward for reward, _ in group], [cut for _, cut in group]
    assert paid(rewards, cut_off, "keep") == paid(rewards, cut_off, "mask") == rewards
    figures = paid(rewards, cut_off, "zero")
    whole = [figure for figure, cut in zip(figures, cut_off, strict=True) if not cut]
    assert whole == [reward for reward, cut in group if not cut]
    for figure, cut in zip(figures, cut_off, strict=True):
        assert not cut or figure <= min([0.0, *whole])


def test_treatments_have_names() -> None:
    assert [overlong_of(name) for name in TREATMENTS] == ["keep", "mask", "zero"]
    for name in ("drop", "Zero", ""):
        with pytest.raises(UsageError, match=r"no treatment of overlong rollouts .* use keep, mask or zero"):
            overlong_of(name)
