"""The section about the ledger: its bars are compared, and a ledger that grows misses them."""

from __future__ import annotations

from typing import Any

from netem.report.host_sections import GROWTH, ledger


def _row(database: str, load: str, results_s: float, p99_ms: float) -> dict[str, Any]:
    times = dict.fromkeys(
        ("lease_p50_ms", "results_p50_ms", "results_p99_ms", "heartbeat_p50_ms", "heartbeat_p99_ms"), 5.0
    )
    return {"database": database, "load": load, "results_s": results_s, "lease_p99_ms": p99_ms, **times}


def _document(*, rows: float = 0.0) -> dict[str, Any]:
    """``rows``: that a thousand results leave behind."""
    names = ("database_bytes", "body_bytes", "resident_bytes", "cpu_ms", "lease_p99_ms")
    growth = [
        {"database": "SQLite", "results": 1000 * n, "rows": 5000 + rows * n, **dict.fromkeys(names, 1e6)}
        for n in range(1, 11)
    ]
    both = [
        _row("SQLite", "full load", 900.0, 300.0), _row("SQLite", "paced", 450.0, 60.0),
        _row("PostgreSQL", "full load", 400.0, 300.0), _row("PostgreSQL", "paced", 200.0, 160.0),
    ]  # fmt: skip
    return {"limit_results_s": 4000.0, "rows": both, "growth": growth}


def test_missed_bars_name_the_slow_database() -> None:
    missed = {(one.where, one.what) for one in ledger(_document()).compared if one.lost}
    assert missed == {
        ("ledger, PostgreSQL", "results/s under full load"),
        ("ledger, PostgreSQL", "lease at half the load, p99, ms"),
    }


def test_rows_that_stay_miss_the_bar_on_growth() -> None:
    growing = [one for one in ledger(_document(rows=1000.0)).compared if one.where == "ledger, SQLite" and one.lost]
    assert [(one.what, one.case) for one in growing] == [("second half ÷ first half", "rows")]
    assert growing[0].theirs == GROWTH


def test_text_has_a_row_for_each_load_and_each_size() -> None:
    section = ledger(_document())
    assert len(section.blocks[1].splitlines()) == 2 + 4
    assert len(section.data["ledger-growth"].rows) == 10
