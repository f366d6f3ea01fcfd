"""What is read out of a peer's report: the rows that make sense, whatever else is in there."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast import limits
from p2pcast.version import Version
from trainer_node.engines import EngineRow, engine_rows

GOOD = {
    "name": "vllm:http://h:1",
    "started": True,
    "ready": True,
    "staged": "1.7",
    "committed": "1.6",
    "pause_s": 0.25,
    "recomputed_tokens": 12,
    "error": None,
    "detail": {"worker_s": 0.1},
}


def test_a_row_as_a_peer_sends_it():
    (row,) = engine_rows({"engines": [GOOD]})
    assert row == EngineRow("vllm:http://h:1", True, True, Version(1, 7), Version(1, 6), 0.25, 12, None, GOOD)
    assert row.shown == GOOD


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("started", 1, False),
        ("ready", "yes", False),
        ("staged", [1, 7], None),
        ("staged", "newest", None),
        ("committed", f"{limits.MAX_BRANCH + 1}.0", None),
        ("committed", "0." + "9" * 19, None),
        ("pause_s", math.nan, None),
        ("pause_s", 10**30, None),
        ("pause_s", -0.5, None),
        ("pause_s", "long", None),
        ("recomputed_tokens", -1, None),
        ("recomputed_tokens", True, None),
        ("error", 7, None),
        ("error", "x" * 9000, "x" * limits.MAX_EVENT_TEXT),
    ],
)
def test_what_makes_no_sense_is_left_out(key, value, read):
    (row,) = engine_rows({"engines": [GOOD | {key: value}]})
    assert getattr(row, key) == read


@pytest.mark.parametrize("name", [None, 7, "", "x" * (limits.MAX_ENGINE_NAME + 1)])
def test_a_row_without_a_name_is_none(name):
    assert engine_rows({"engines": [GOOD | {"name": name}, GOOD]}) == engine_rows({"engines": [GOOD]})


def test_a_name_counts_once():
    assert [r.ready for r in engine_rows({"engines": [GOOD, GOOD | {"ready": False}]})] == [False]


@pytest.mark.parametrize("report", [{}, {"engines": None}, {"engines": {"name": "x"}}, {"engines": [b"\xff", None, [], 3]}])
def test_reports_without_engines(report):
    assert engine_rows(report) == []


def test_live_means_ready_with_it_or_a_newer_one():
    (row,) = engine_rows({"engines": [GOOD]})
    assert [row.is_live(Version(*v)) for v in ((0, 9), (1, 6), (1, 7), (2, 0))] == [True, True, False, False]
    (row,) = engine_rows({"engines": [GOOD | {"ready": False}]})
    assert not row.is_live(Version(0, 9))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["engines", "x"]), st.lists(JSON, max_size=4) | JSON))
def test_no_report_is_an_error(report):
    for row in engine_rows(report):
        assert row.name
        assert row.pause_s is None or math.isfinite(row.pause_s)
