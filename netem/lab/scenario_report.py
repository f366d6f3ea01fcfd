"""A scenario's document as a table and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from netem.lab.requirements import sentence

SOURCE = "source"
"""Key of paper rows: the section or figure. Shown as a column if there are such rows."""


def table(document: Mapping[str, Any]) -> Table:
    """Measured and simulated rows, followed by the paper's rows. Shows all keys if the scenario names no columns."""
    rows, reference = document["rows"], document["reference"]
    columns = dict(document["columns"]) or {key: key for row in rows for key in row if key != "case"}
    if reference:
        columns[SOURCE] = "from"
    shown = Table(*map(escape, columns.values()))
    for row in rows:
        shown.add_row(*(escape(text(row.get(key))) if key != SOURCE else origin(row) for key in columns))
    if reference:
        shown.add_section()
    for row in reference:
        shown.add_row(*(escape(text(row.get(key))) for key in columns))
    return shown


def origin(row: Mapping[str, Any]) -> str:
    """How a row that is not the paper's came about."""
    return "simulated" if row.get("simulated") else "measured"


def text(value: object) -> str:
    """A value with few significant digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def sentences(document: Mapping[str, Any]) -> Iterator[str]:
    on = document["machine"]
    yield f"{document['scenario']}: {document['what']}" + (f" ({document['paper']})" if document["paper"] else "")
    if document["scale"]:
        yield f"scale: {document['scale']}"
    yield f"backend {document['backend']}; {on['cpu']}, {on['cores']} cores, {on['kernel']}; {document['took_s']:.0f} s"
    for calibration in document["calibrations"]:
        for off in calibration["off"]:
            yield f"case {calibration['case']} left out: {off}"
    for failed in document["failed"]:
        yield f"case {failed['case']} failed: {failed['why']}"
    yield from map(sentence, document["holds"])
