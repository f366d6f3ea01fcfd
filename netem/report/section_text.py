"""Building blocks of sections: tables, figures, plots, and comparisons that p2pcast may lose. Pure; the same data gives
the same text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netem.bench.figures_text import NONE, Column, Row, filled, value_of
from netem.lab.requirements import compared
from netem.lab.scenario import Requirement


@dataclass(frozen=True, slots=True)
class RivalComparison:
    """One comparison. ``case``: where in the measurement; comparisons that differ in it alone are merged. ``rival``:
    the other system; None for a bar. ``ours`` and ``theirs``: figures; for a bar, ``theirs`` is the bound. ``less``:
    whether the smaller figure is better.
    """

    where: str
    what: str
    ours: float
    theirs: float
    rival: str | None = None
    less: bool = True
    case: str = ""

    @property
    def lost(self) -> bool:
        return self.ours > self.theirs if self.less else self.ours < self.theirs

    @property
    def by(self) -> float | None:
        """The worse figure as a multiple of the better one; None if that is 0."""
        above, below = (self.ours, self.theirs) if self.less else (self.theirs, self.ours)
        return above / below if below > 0 else None


def judged(
    where: str, rows: Sequence[Row], hold: Requirement, rival: str | None = None, *, case: str = "", times: float = 1.0
) -> Iterator[RivalComparison]:
    """Judge a requirement in the language of scenarios. ``case`` is a template of the judged row, and ``rival`` of the
    row with which that row is compared. ``times``: factor of the figures that are shown.
    """
    for found in compared(hold, rows, ()):
        other, against = found.other or (1.0, found.row)
        yield RivalComparison(
            where, hold.what, times * found.row[hold.key], times * found.bound * other,
            rival and filled(rival, against), less=hold.above is None, case=filled(case, found.row),
        )  # fmt: skip


def merged(some: Sequence[RivalComparison]) -> list[list[str]]:
    """A row for each figure, with its cases and the other systems: where, what, case, p2pcast, other, by."""
    groups: dict[tuple[str, str], list[RivalComparison]] = {}
    for one in some:
        groups.setdefault((one.where, one.what), []).append(one)
    return [_merged(group) for group in groups.values()]


def _merged(group: Sequence[RivalComparison]) -> list[str]:
    cases = list(dict.fromkeys(one.case for one in group if one.case))
    names = list(dict.fromkeys(one.rival or "" for one in group))
    others = (f"{name} {span([one.theirs for one in group if (one.rival or '') == name])}".strip() for name in names)
    by = [one.by for one in group if one.by is not None]
    return [
        group[0].where, group[0].what, "; ".join(cases) if len(cases) < 5 else f"{cases[0]} … {cases[-1]}",
        span([one.ours for one in group]), "; ".join(others), span(by) if by else NONE,
    ]  # fmt: skip


def span(values: Sequence[float]) -> str:
    least, most = figure(min(values)), figure(max(values))
    return least if least == most else f"{least}–{most}"


@dataclass(frozen=True, slots=True)
class Figures:
    """A table of which all rows go into a file."""

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.headings)
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True, slots=True)
class Picture:
    """``series``: name → x → y. ``bars``: grouped bars instead of lines. ``log``: the logarithmic axes, of ``xy``.
    ``bound``: a named horizontal line.
    """

    file: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Mapping[Any, float]]
    bars: bool = False
    log: str = ""
    bound: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """``blocks``: Markdown paragraphs. ``compared``: comparisons; losses are listed. ``data``: all rows, by name of
    the file. ``best``: figures in which p2pcast is ahead: their name, its own, and others'.
    """

    title: str
    blocks: Sequence[str]
    compared: Sequence[RivalComparison] = field(default_factory=tuple)
    pictures: Sequence[Picture] = field(default_factory=tuple)
    data: Mapping[str, Figures] = field(default_factory=dict)
    best: Sequence[Sequence[object]] = field(default_factory=tuple)


def figure(value: float | None, digits: int = 3) -> str:
    """The value with ``digits`` significant digits; larger whole numbers in groups of three digits."""
    if value is None:
        return NONE
    if value and abs(value) < 10 ** (digits - 1):
        short = f"{value:.{digits}g}"
        return f"{value:.4f}".rstrip("0") if "e" in short else short
    return f"{value:,.0f}".replace(",", " ")


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.3g} %"


def cell(value: object) -> str:
    """A table cell for any JSON value."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return figure(value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(lines)


def table_of(rows: Iterable[Row], columns: Sequence[tuple[str, Column]]) -> str:
    """A line for each row, with its values in the columns (heading, column)."""
    every = data_of(rows, columns)
    return table(every.headings, every.rows)


def data_of(rows: Iterable[Row], columns: Sequence[tuple[str, Column]]) -> Figures:
    return Figures([head for head, _ in columns], [[value_of(row, one) for _, one in columns] for row in rows])


def pivot(headings: Sequence[str], cells: Iterable[tuple[Sequence[object], object, object]]) -> str:
    """A table of (names of the row, column, value), in the order of their first appearance."""
    found: dict[tuple[object, ...], dict[object, object]] = {}
    across: dict[object, None] = {}
    for names, column, value in cells:
        found.setdefault(tuple(names), {})[column] = value
        across[column] = None
    return table([*headings, *map(cell, across)], ([*names, *map(row.get, across)] for names, row in found.items()))
