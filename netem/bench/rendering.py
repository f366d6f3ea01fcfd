"""The one renderer of measurements: a document as tables and sentences, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netem.bench.figures_text import NONE, Column, Row, value_of
from p2pcast.cli.options import console, written

if TYPE_CHECKING:
    from rich.table import Table


def table(rows: Iterable[Row], columns: Sequence[tuple[str, Column]], title: str | None = None) -> Table:
    """A line for each row, with its values in the columns (heading, column). Figures stand on the right."""
    from rich.table import Table

    made = Table(title=title)
    for heading, column in columns:
        figure = isinstance(column, str) and ":" in column
        made.add_column(heading, justify="right" if figure else "left", overflow="fold")
    for row in rows:
        made.add_row(*(NONE if (value := value_of(row, column)) is None else str(value) for _, column in columns))
    return made


def render(document: dict[str, Any], shown: Iterable[Table | str], output: Path | None, *, as_json: bool) -> None:
    """Write the document to ``output``, and print it, or what is ``shown`` of it. Raises LocalError."""
    if written(document, output, as_json=as_json):
        return
    out = console()
    for part in shown:
        if isinstance(part, str):
            click.echo(part)
        else:
            out.print(part)
