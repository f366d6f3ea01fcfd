"""Building blocks of sections: tables, figures, plots, and comparisons that p2pcast may lose. Pure; the same data gives
the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

NONE: Final = "–"


@dataclass(frozen=True, slots=True)
class Comparison:
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
    compared: Sequence[Comparison] = field(default_factory=tuple)
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
