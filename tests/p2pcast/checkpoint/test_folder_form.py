"""Names of step folders, and their patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.checkpoint.folder_form import MARKERS, MOST_DIGITS, StepNames
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_STEP

AFFIXES = st.text("ab_-019Z", max_size=6)


@given(AFFIXES, st.integers(1, MOST_DIGITS), AFFIXES, st.integers(0, MAX_STEP))
def test_every_step_is_read_from_its_own_name(prefix: str, width: int, suffix: str, step: int) -> None:
    names = StepNames(prefix, width, suffix)
    assert StepNames.parse(str(names)) == names
    assert names.step_of(names.name(step)) == step


@given(AFFIXES, st.integers(2, MOST_DIGITS), AFFIXES, st.text("ab_-019Z", max_size=24))
def test_a_pattern_with_a_width_reads_its_own_names_alone(prefix: str, width: int, suffix: str, name: str) -> None:
    """Two folders would otherwise claim one step, and a peer would write a third."""
    names = StepNames(prefix, width, suffix)
    step = names.step_of(name)
    assert step is None or names.name(step) == name


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("step_{step}", "step_7", 7),
        ("step_{step}", "step_007", 7),
        ("weight_v{step:06}", "weight_v000007", 7),
        ("weight_v{step:06}", "weight_v1234567", 1234567),
        ("weight_v{step:06}", "weight_v7", None),
        ("weight_v{step:06}", "weight_v0000007", None),
        ("weight_update_v{step}", "weight_update_v0", 0),
        ("delta-{step:08}", "delta-00000007", 7),
        ("{step}", "12", 12),
        ("{step}", "+1", None),
        ("{step}", "1_0", None),
        ("step_{step}", "step_٣", None),
        ("step_{step}", "step_", None),
        ("step_{step}", f"step_{MAX_STEP}", MAX_STEP),
        ("step_{step}", f"step_{MAX_STEP + 1}", None),
        ("step_{step}", "step_" + "9" * 10_000, None),
        ("a{step}a", "a", None),
        ("1{step}1", "11", None),
    ],
)
def test_names_are_read_as_their_pattern_says(pattern: str, name: str, step: int | None) -> None:
    assert StepNames.parse(pattern).step_of(name) == step


@pytest.mark.parametrize(
    "pattern",
    ["", "step_", "step_{step}{step}", "step_{n}", "../{step}", ".{step}", "a/{step}", "{step:6}", "{step:00}",
     "{step:020}", "{step:06d}", "a b{step}", "é{step}", "a" * 100 + "{step}", "{step}.part-"],
)  # fmt: skip
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="no pattern of folder names"):
        StepNames.parse(pattern)


def test_no_marker_counts_as_content() -> None:
    for marker in MARKERS.values():
        assert all(name in marker for name in (*marker.before, marker.last))
        assert "model.safetensors" not in marker
