"""Templates of figures, and the one renderer of measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from netem.bench.figures_text import filled, value_of
from netem.bench.rendering import Measurement, command, table
from p2pcast.cli.settings import setting

ROW = {"s": 0.0123, "bytes": 3 << 20, "rate": 20e6, "none": None, "choice": {"stripes": 4}, "name": "a [b]"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{s:.2f}", "0.01"),
        ("{s:ms .1f} ms", "12.3 ms"),
        ("{bytes:MiB .0f} MiB", "3 MiB"),
        ("{bytes:,}", "3,145,728"),
        ("{rate:Mbit/s g} Mbit/s", "20 Mbit/s"),
        ("{none:ms .1f}", "–"),
        ("{choice[stripes]} of {name}", "4 of a [b]"),
    ],
)
def test_a_template_shows_values_in_their_units(template: str, text: str) -> None:
    assert filled(template, ROW) == text


def test_a_column_is_a_key_or_a_template_or_a_function() -> None:
    assert [value_of(ROW, one) for one in ("s", "{s:.1f}", lambda row: row["bytes"] >> 20)] == [0.0123, "0.0", 3]
    with pytest.raises(KeyError, match="missing"):
        value_of(ROW, "{missing:.1f}")


@dataclass(frozen=True, slots=True)
class GrownMeasurement(Measurement):
    """Grow a document."""

    rows: int = setting(2, "Number of rows.", 1)
    bad: bool = setting(False, "A failure.")

    def measure(self) -> Iterator[dict[str, Any]]:
        document: dict[str, Any] = {"rows": []}
        for number in range(self.rows):
            document["rows"].append({"n": number, "s": None})
            yield document

    def shown(self, document: dict[str, Any]) -> Iterator[Any]:
        yield table(document["rows"], [("number", "{n:d}"), ("s", "{s:.1f}")], "a title")
        yield f"{len(document['rows'])} rows"

    def failed(self, document: dict[str, Any]) -> bool:
        return self.bad


def test_a_record_is_a_command_with_a_table_or_json(tmp_path: Path) -> None:
    file, expected = tmp_path / "out.json", {"rows": [{"n": 0, "s": None}, {"n": 1, "s": None}]}
    shown = CliRunner().invoke(command(GrownMeasurement), ["-o", str(file)])
    assert (shown.exit_code, json.loads(file.read_text())) == (0, expected)
    assert [word in shown.output for word in ("a title", "number", "–", "2 rows")] == [True] * 4
    failed = CliRunner().invoke(command(GrownMeasurement), ["--json", "--bad"])
    assert (failed.exit_code, json.loads(failed.output)) == (1, expected)
    assert CliRunner().invoke(command(GrownMeasurement), ["--rows", "0"]).exit_code == 2
