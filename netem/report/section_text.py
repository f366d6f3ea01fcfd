"""Building blocks of sections: tables, figures, plots, and comparisons that p2pcast may lose. Pure; the same data gives
the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from netem.bench.figures_text import NONE, Column, Row, filled, value_of
from netem.lab.requirements import compared
from netem.lab.scenario import Requirement


@dataclass(frozen=True, slots=True)
class RivalComparison:
    """One comparison. ``rival``: the other system; None for a bar. ``ours`` and ``theirs``: figures; for a bar,
    ``theirs`` is the bound. ``less``: whether the smaller figure is better.
    """

    where: str
    what: str
    ours: float
    theirs: float
    rival: str | None = None
    less: bool = True

    @property
    def lost(self) -> bool:
        return self.ours > self.theirs if self.less else self.ours < self.theirs

    def cells(self) -> list[str]:
        above, below = (self.ours, self.theirs) if self.less else (self.theirs, self.ours)
        by = f"{above / below:.2f} ×" if below > 0 else figure(above - below)
        return [self.where, self.what, figure(self.ours), f"{self.rival or 'bar'}: {figure(self.theirs)}", by]


def judged(
    where: str, rows: Sequence[Row], hold: Requirement, rival: str | None = None, *, times: float = 1.0
) -> Iterator[RivalComparison]:
    """Judge a requirement in the language of scenarios. ``hold.what`` is a template of the judged row, and ``rival`` of
    the row with which that row is compared. ``times``: factor of the figures that are shown.
    """
    for found in compared(hold, rows, ()):
        other, against = found.other or (1.0, found.row)
        yield RivalComparison(
            where, filled(hold.what, found.row), times * found.row[hold.key], times * found.bound * other,
            rival and filled(rival, against), less=hold.above is None,
        )  # fmt: skip


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
    """``blocks``: Markdown paragraphs. ``compared``: all comparisons; the report lists the lost ones."""

    title: str
    blocks: Sequence[str]
    compared: Sequence[RivalComparison] = field(default_factory=tuple)
    pictures: Sequence[Picture] = field(default_factory=tuple)


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
    return table([heading for heading, _ in columns], ([value_of(row, one) for _, one in columns] for row in rows))
