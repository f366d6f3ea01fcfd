"""What sections are made of: tables, figures, pictures, and where p2pcast loses. Pure; the same data give the same text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

NONE: Final = "–"


@dataclass(frozen=True, slots=True)
class Loss:
    """``rival``: who is ahead; None where a bar is missed. ``ours`` and ``theirs``: figures; a bar's is its bound. ``less``: whether the smaller one is the better."""

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
    """``series``: name → x → y. ``bars``: groups of them, else lines. ``log``: axes that are logarithmic, of ``xy``. ``bound``: a line across, named."""

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
    """``blocks``: Markdown, a blank line between two. ``compared``: all that could have been lost; those that were are listed."""

    title: str
    blocks: Sequence[str]
    compared: Sequence[Loss] = field(default_factory=tuple)
    pictures: Sequence[Picture] = field(default_factory=tuple)


def figure(value: float | None, digits: int = 3) -> str:
    """So many significant digits; whole numbers of more in groups of three."""
    if value is None:
        return NONE
    if value and abs(value) < 10 ** (digits - 1):
        short = f"{value:.{digits}g}"
        return f"{value:.4f}".rstrip("0") if "e" in short else short
    return f"{value:,.0f}".replace(",", " ")


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.3g} %"


def cell(value: object) -> str:
    """Whatever a document holds, for a table."""
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
