"""Requirements checked against rows, and plots of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from netem.lab.requirements import judged, sentence
from netem.lab.scenario import Plot, Requirement
from netem.lab.scenario_plots import draw, series
from netem.lab.scenario_report import sentences, table
from netem.report import section_text

ROWS: list[dict[str, Any]] = [
    {"case": 1, "delay": 10, "system": "ours", "all_s": 1.0, "bound": 1.2, "predicted_s": 1.1},
    {"case": 1, "delay": 10, "system": "star", "all_s": 3.0},
    {"case": 1, "delay": 10, "system": "torrent", "skipped": "not installed", "all_s": None},
    {"case": 2, "delay": 20, "system": "ours", "all_s": 2.0, "bound": 1.2, "predicted_s": 2.0},
    {"case": 2, "delay": 20, "system": "star", "all_s": 1.6},
]
PLAIN = Requirement("what", "all_s", {"system": ("ours",)}, None, (), None, None, None)


def test_a_number_or_a_key_of_the_row_is_the_bound() -> None:
    said = judged(replace(PLAIN, below="bound"), ROWS, ["delay"])
    assert said["held"] is False
    assert said["rows"] == 2
    (missed,) = said["missed"]
    assert missed["row"]["delay"] == 20
    assert missed["margin"] == pytest.approx(-0.8 / 1.2, abs=1e-4)
    assert "1 of 2; worst 2, bound 1.2, off by 66.7%" in sentence(said)
    assert judged(replace(PLAIN, above=0.5), ROWS, [])["held"] is True


def test_requirement_against_another_key() -> None:
    said = judged(replace(PLAIN, key="predicted_s", against="all_s", within=0.15), ROWS, ["delay"])
    assert said["held"] is True
    assert said["nearest"]["value"] == pytest.approx(1.1)
    assert judged(replace(PLAIN, key="predicted_s", against="all_s", within=0.05), ROWS, ["delay"])["held"] is False


def test_requirement_against_rows_of_the_same_case() -> None:
    said = judged(replace(PLAIN, against={"system": ("star", "torrent")}, below=1.0), ROWS, ["delay"])
    assert said["rows"] == 2, "a row that was left out has no figure"
    assert said["held"] is False
    assert said["nearest"]["value"] == 1.25


def test_any_figure_exceeds_a_rivals_zero() -> None:
    hold = replace(PLAIN, against={"system": ("star",)}, below=1.0)
    for ours, held in ((0.042, False), (0.0, True)):
        rows = [{"system": "ours", "all_s": ours}, {"system": "star", "all_s": 0.0}]
        assert judged(hold, rows, [])["held"] is held
        assert [one.lost for one in section_text.judged("live", rows, hold, "{system}")] == [not held]


def test_requirement_without_rows_is_not_held() -> None:
    said = judged(replace(PLAIN, where={"system": ("nobody",)}, above=1.0), ROWS, [])
    assert said["held"] is None
    assert sentence(said).startswith("not shown")


DOCUMENT: dict[str, Any] = {
    "scenario": "s",
    "what": "w [x]",
    "paper": "P",
    "scale": "small",
    "backend": "uml",
    "took_s": 3.0,
    "rows": ROWS,
    "machine": {"cpu": "c", "cores": 2, "kernel": "k"},
    "columns": {"delay": "delay, ms", "system": "system", "all_s": "s"},
    "reference": [{"source": "Figure 9", "system": "theirs", "delay": 10, "all_s": 4.71}],
    "calibrations": [{"case": 3, "off": ["a → b: 1.0 Mbit/s instead of 2.0 Mbit/s"]}],
    "failed": [{"case": 4, "why": "it broke"}],
    "holds": [judged(replace(PLAIN, above=0.5), ROWS, [])],
}


def test_table_shows_paper_rows_after_ours() -> None:
    shown = table(DOCUMENT)
    assert [column.header for column in shown.columns] == ["delay, ms", "system", "s", "from"]
    assert shown.row_count == len(ROWS) + 1
    said = "\n".join(sentences(DOCUMENT))
    for part in ("scale: small", "case 3 left out: a → b", "case 4 failed: it broke", "held: what"):
        assert part in said


def test_plots_are_drawn(tmp_path: Path) -> None:
    line = Plot("delay", "all_s", "line", "times", ("system",), log="y")
    assert series(line, ROWS) == {"ours": {10: 1.0, 20: 2.0}, "star": {10: 3.0, 20: 1.6}}
    assert series(replace(line, where={"system": ("ours",)}), ROWS) == {"ours": {10: 1.0, 20: 2.0}}
    assert series(line, DOCUMENT["reference"], paper=True) == {"theirs, Figure 9": {10: 4.71}}
    pytest.importorskip("matplotlib")
    nothing = Plot("delay", "nothing", "none", "nothing")
    drawn = draw([line, Plot("system", "all_s", "bar", "bars", kind="bar"), nothing], DOCUMENT, tmp_path)
    assert [path.name for path in drawn] == ["s-line.png", "s-bar.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
