"""Versions, from events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.page.fleet_history import VERSIONS_KEPT, FleetHistory

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = ["opened", "sealed", "published", "staged", "committed", "other"]
NAMES = ["version", "bytes", "peer", "engine", "after_s", "pause_s", "lost", "why", "codec", "changed", "params"]


def spread() -> FleetHistory:
    history = FleetHistory()
    history.apply("opened", 100.0, {"version": "0.1"})
    history.apply("sealed", 100.5, {"version": "0.1", "bytes": 7})
    history.apply("published", 100.5, {"version": "0.1", "codec": "flat", "changed": 1, "params": 4})
    history.apply("published", 100.5, {"version": "0.1", "codec": "dense", "changed": 1, "params": 0})
    for number in range(1, 4):
        history.apply("staged", 101.0, {"peer": f"p{number}", "version": "0.1", "after_s": number / 10})
        facts = {"peer": f"p{number}", "engine": "e", "version": "0.1", "after_s": number, "pause_s": number / 100}
        history.apply("committed", 102.0, facts)
    return history


def test_a_version_is_summed_up() -> None:
    assert spread().document()["0.1"] == {
        "opened": 100.0,
        "sealed_after": 0.5,
        "bytes": 7,
        "codec": "flat",
        "density": 0.25,
        "staged": {"count": 3, "median": 0.2, "most": 0.3},
        "live": {"count": 3, "median": 2.0, "most": 3.0},
        "pause": {"count": 3, "median": 0.02, "most": 0.03},
        "slowest": [["p3/e", 3.0, 0.03], ["p2/e", 2.0, 0.02], ["p1/e", 1.0, 0.01]],
    }


def test_memory_is_bounded() -> None:
    history = FleetHistory()
    for number in range(5000):
        history.apply("opened", 0.0, {"version": f"0.{number}"})
    assert len(history.versions) == VERSIONS_KEPT
    assert next(reversed(history.versions)) == "0.4999"


@pytest.mark.parametrize("facts", [{}, {"version": "0.1"}, {"version": "0.1", "bytes": "many"}])
def test_a_malformed_event_changes_no_fact(facts: dict[str, Any]) -> None:
    history = spread()
    before = history.document()
    for kind in ("sealed", "staged", "committed"):
        history.apply(kind, 1.0, facts)
    assert history.document() == before


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(NAMES), JSON)), max_size=30))
def test_no_event_fails(events: list[tuple[str, dict[str, Any]]]) -> None:
    history = FleetHistory()
    for kind, facts in events:
        history.apply(kind, 1.0, facts)
    history.document()
