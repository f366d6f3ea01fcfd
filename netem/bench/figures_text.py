"""Texts of a document's figures: cells of tables, and sentences, from templates. Pure.

A column is a key of the row, a template of ``str.format`` whose fields are keys of the row, or a function of the row.
A field's format may begin with a unit, as in ``{copy_s:ms .0f} ms``: the value is in seconds, bytes or bits per second,
and is shown in that unit. A value that was not measured (None) is ``–``, without the unit in a table.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

NONE: Final = "–"
UNITS: Final = {
    "ms": 1e3,
    "kB": 1e-3,
    "MB": 1e-6,
    "GB": 1e-9,
    "MiB": 2.0**-20,
    "GiB": 2.0**-30,
    "Mbit/s": 1e-6,
    "Gbit/s": 1e-9,
}
Row = Mapping[str, Any]
Column = str | Callable[[Row], object]
Columns = Sequence[tuple[str, Column]]
"""Heading → column."""


class _NotMeasuredError(Exception):
    """A cell whose value is None."""


class _Sentence(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        unit, _, rest = format_spec.rpartition(" ")
        return NONE if value is None else format(value * UNITS[unit] if unit else value, rest)


class _Cell(_Sentence):
    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            raise _NotMeasuredError
        return super().format_field(value, format_spec)


def filled(template: str, row: Row) -> str:
    """The template with values of the row. Raises KeyError for a field that the row does not have."""
    return _Sentence().vformat(template, (), row)


def value_of(row: Row, column: Column) -> object:
    """The value of the row that a table shows in the column. Raises KeyError."""
    if callable(column):
        return column(row)
    if "{" not in column:
        return row[column]
    try:
        return _Cell().vformat(column, (), row)
    except _NotMeasuredError:
        return NONE
