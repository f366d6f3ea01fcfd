"""A command of ``p2pcast bench`` from a record of its parameters, and the one renderer of its document: tables and
sentences, or JSON.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netem.bench.figures_text import NONE, Columns, Row, value_of
from p2pcast.cli.options import console, documented, write_document
from p2pcast.cli.settings import options
from p2pcast.ground.errors import EXIT_FAILED

if TYPE_CHECKING:
    from rich.table import Table


def table(rows: Iterable[Row], columns: Columns, title: str | None = None) -> Table:
    """A line for each row, with its values in the columns (heading, column). Figures stand on the right."""
    from rich.table import Table

    made = Table(title=title)
    for heading, column in columns:
        figure = isinstance(column, str) and ":" in column
        made.add_column(heading, justify="right" if figure else "left", overflow="fold")
    for row in rows:
        made.add_row(*(NONE if (value := value_of(row, column)) is None else str(value) for _, column in columns))
    return made


Document = dict[str, Any]


class Measurement(ABC):
    """The base of a measurement's record: a frozen dataclass whose fields are settings, and whose text is the help."""

    @abstractmethod
    def measure(self) -> Document | Iterator[Document]:
        """The document. An iterator gives it again whenever it has grown, and each is written."""

    @abstractmethod
    def shown(self, document: Document) -> Iterator[Table | str]:
        """The tables, and the sentences below them."""

    def failed(self, document: Document) -> bool:
        """Whether the command ends with exit code 1."""
        return False


def command(record: type[Measurement]) -> click.Command:
    """The command of a record. ``XMeasurement`` makes the command ``x``."""

    @click.command(record.__name__.removesuffix("Measurement").lower(), help=record.__doc__)
    @options(record, None)
    @documented
    def run(bench: Measurement, as_json: bool, output: Path | None) -> None:
        found = bench.measure()
        document: Document = {}
        for document in [found] if isinstance(found, dict) else found:
            write_document(document, output)
        if as_json:
            click.echo(json.dumps(document))
        else:
            for part in bench.shown(document):
                click.echo(part) if isinstance(part, str) else console().print(part)
        if bench.failed(document):
            sys.exit(EXIT_FAILED)

    return run
