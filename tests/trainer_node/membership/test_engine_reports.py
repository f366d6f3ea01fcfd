"""Rows of a peer's report, after invalid values were removed (tests/p2pcast/wire/test_lenient_report.py)."""

from __future__ import annotations

import pytest

from p2pcast.ground.version import Version
from trainer_node.membership.engine_reports import EngineRow, engine_rows

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


def test_a_peers_row_is_parsed():
    (row,) = engine_rows([GOOD])
    assert row == EngineRow("vllm:http://h:1", True, True, Version(1, 7), Version(1, 6), 0.25, 12, None, GOOD)
    assert row.shown == GOOD


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("started", False),
        ("ready", False),
        ("staged", None),
        ("committed", None),
        ("pause_s", None),
        ("recomputed_tokens", None),
        ("error", None),
    ],
)
def test_removed_values_count_as_missing(key, read):
    (row,) = engine_rows([{k: v for k, v in GOOD.items() if k != key}])
    assert getattr(row, key) == read


def test_a_name_counts_once():
    assert [r.ready for r in engine_rows([GOOD, GOOD | {"ready": False}])] == [False]


def test_reports_without_engines():
    assert engine_rows([]) == []


def test_live_means_ready_at_the_version_or_a_newer_version():
    (row,) = engine_rows([GOOD])
    assert [row.is_live(Version(*v)) for v in ((0, 9), (1, 6), (1, 7), (2, 0))] == [True, True, False, False]
    (row,) = engine_rows([GOOD | {"ready": False}])
    assert not row.is_live(Version(0, 9))
