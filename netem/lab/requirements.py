"""Checks a scenario's requirements against its rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netem.lab.scenario import Requirement

Row = Mapping[str, Any]
LEAST: Final = 1e-9
"""Divisor in place of another row's figure of 0, so that any figure exceeds that one."""


@dataclass(frozen=True, slots=True)
class BoundComparison:
    """``margin``: distance to the bound as a share of the bound; negative for a miss. ``other``: the divisor of the
    value, and its row; None where the value is not divided.
    """

    row: Row
    value: float
    bound: float
    margin: float
    other: tuple[float, Row] | None = None


def judged(hold: Requirement, rows: Sequence[Row], swept: Iterable[str]) -> dict[str, Any]:
    """``held``: None if no row could be compared. ``nearest``: the row with the least margin. ``missed``: rows with a
    negative margin, worst first.
    """
    found = sorted(compared(hold, rows, tuple(swept)), key=lambda each: each.margin)
    missed = [each for each in found if each.margin < 0]
    return {
        "what": hold.what,
        "held": not missed if found else None,
        "rows": len(found),
        "nearest": _document(found[0], hold) if found else None,
        "missed": [_document(each, hold) for each in missed],
    }


def compared(hold: Requirement, rows: Sequence[Row], swept: tuple[str, ...]) -> Iterator[BoundComparison]:
    for row in rows:
        if not matches(row, hold.where) or not isinstance(row.get(hold.key), int | float):
            continue
        for other in _others(hold, row, rows, swept):
            value = float(row[hold.key])
            if other is not None:
                value /= other[0] or LEAST
            for bound, margin in _margins(hold, row, value):
                yield BoundComparison(row, value, bound, margin, other)


def matches(row: Row, where: Mapping[str, Sequence[Any]]) -> bool:
    return all(row.get(key) in values for key, values in where.items())


def _others(
    hold: Requirement, row: Row, rows: Sequence[Row], swept: tuple[str, ...]
) -> Iterator[tuple[float, Row] | None]:
    """The divisors of the value, each with its row; None if the value is not divided."""
    if hold.against is None:
        yield None
    elif isinstance(hold.against, str):
        if (other := row.get(hold.against)) and isinstance(other, int | float):
            yield float(other), row
    else:
        alike = [key for key in (*swept, *hold.same) if key not in hold.against]
        for each in rows:
            same = matches(each, hold.against) and all(each.get(key) == row.get(key) for key in alike)
            if same and each is not row and isinstance(each.get(hold.key), int | float):
                yield float(each[hold.key]), each


def _margins(hold: Requirement, row: Row, value: float) -> Iterator[tuple[float, float]]:
    for given, sign in ((hold.above, 1), (hold.below, -1)):
        bound = row.get(given) if isinstance(given, str) else given
        if isinstance(bound, int | float):
            yield float(bound), sign * (value - bound) / (abs(bound) or 1.0)
    if hold.within is not None:
        yield 1.0, hold.within - abs(value - 1)


def _document(each: BoundComparison, hold: Requirement) -> dict[str, Any]:
    names = {key: value for key, value in each.row.items() if key != hold.key and isinstance(value, str | int | bool)}
    return {"row": names, "value": round(each.value, 4), "bound": round(each.bound, 4), "margin": round(each.margin, 4)}


def sentence(judgement: Mapping[str, Any]) -> str:
    """The judgement as a sentence."""
    what, nearest = judgement["what"], judgement["nearest"]
    if nearest is None:
        return f"not shown: {what} (no row to look at)"
    figures = f"{nearest['value']:g}, bound {nearest['bound']:g}"
    if judgement["held"]:
        return f"held: {what} ({judgement['rows']} compared; nearest {figures})"
    return (
        f"missed: {what} ({len(judgement['missed'])} of {judgement['rows']}; worst {figures}, off by "
        f"{-nearest['margin']:.1%})"
    )
