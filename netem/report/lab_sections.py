"""Report sections about lab scenarios, from the documents that ``p2pcast lab`` writes. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from netem.lab.requirements import matches
from netem.lab.scenario_report import origin
from netem.report.section_text import Figures, RivalComparison, Section, cell, pivot, table

Document = Mapping[str, Any]
SYSTEM, TIME, OURS = "system", "all_s", "p2pcast"
ROWS: Final = 12
"""Most rows of a table on the page; the data file holds all."""
COLUMNS: Final = 8
"""Columns that the page shows of a scenario without a view."""
NOTED: Final = 6
"""Number of skipped or failed cases that are named."""


@dataclass(frozen=True, slots=True)
class ScenarioView:
    """The part of a scenario's rows that the page shows. ``rows``: keys of the first columns. ``across``: keys whose
    values are further columns with ``value``. ``where``: as of a requirement. ``best``: the name of a figure in which
    p2pcast is ahead, and its key. ``papers``: whether papers' rows are shown.
    """

    rows: Sequence[str]
    across: Sequence[str] = ()
    value: str = ""
    where: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    best: Sequence[str] = ()
    papers: bool = True


VIEWS: Final = {
    name: ScenarioView(**view)
    for name, view in tomllib.loads(Path(__file__).with_name("views.toml").read_text()).items()
}


def lab(document: Document) -> Section:
    name, rows, reference = document["scenario"], list(document["rows"]), list(document["reference"])
    columns = dict(document["columns"]) or {key: key for row in rows for key in row if key != "case"}
    view = VIEWS.get(name) or ScenarioView(tuple(columns)[:COLUMNS])
    paper = f" ({document['paper']})" if document["paper"] else ""
    blocks = [f"{_capital(document['what'])}{paper}."]
    if document["scale"]:
        blocks.append(f"Scale: {document['scale']}.")
    blocks += [*_shown(view, columns, [*rows, *(reference if view.papers else [])]), *_said(document)]
    compared = [*_ahead(name, rows, tuple(document["sweep"])), *_bars(document)]
    every = [[*map(row.get, columns), _source(row)] for row in rows]
    every += [[*map(row.get, columns), row.get("source", "paper")] for row in reference]
    data = {name: Figures([*columns.values(), "source"], every)}
    return Section(f"Lab: {name}", blocks, compared, data=data, best=list(_best(view, rows)))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _source(row: Document) -> str:
    return str(row.get("source") or origin(row))


def _shown(view: ScenarioView, columns: Mapping[str, str], rows: Sequence[Document]) -> Iterator[str]:
    # A paper's row may lack keys that only distinguish measured ones.
    some = [row for row in rows if matches(row, {k: v for k, v in view.where.items() if k in row or "case" in row})]
    some = [row for row in some if row.get(view.value) is not None] if view.across else some[:ROWS]
    papers = any("source" in row for row in some)
    headings = [*(columns.get(key, key) for key in view.rows), *["from"] * papers]
    names = [[*map(row.get, view.rows), *[_source(row)] * papers] for row in some]
    if not view.across:
        yield table(headings, names)
        return
    yield f"{_capital(columns[view.value])}, by {' and '.join(columns.get(key, key) for key in view.across)}:"
    across = (" ".join(cell(row.get(key)) for key in view.across) for row in some)
    yield pivot(headings, zip(names, across, (row[view.value] for row in some), strict=True))


def _best(view: ScenarioView, rows: Sequence[Document]) -> Iterator[list[object]]:
    """The figure of the whole run beside that of the first other system."""
    if view.best:
        what, key = view.best
        whole = {row[SYSTEM]: row[key] for row in rows if row.get("phase") == "all" and row.get(key) is not None}
        yield [what, whole.pop(OURS), ", ".join(f"{name} {cell(value)}" for name, value in whole.items())]


def _said(document: Document) -> Iterator[str]:
    """The number of requirements that held, and skipped cases with their reasons. Missed ones are in another table."""
    holds = document["holds"]
    if holds:
        yield f"{sum(bool(hold['held']) for hold in holds)} of {len(holds)} bars held."
    unseen = [f"not shown: {hold['what']} (no row to look at)" for hold in holds if hold["held"] is None]
    gone = [f"case {c['case']} left out: {off}" for c in document["calibrations"] for off in c["off"]]
    gone += [f"case {failed['case']} failed: {failed['why']}" for failed in document["failed"]]
    if len(gone) > NOTED:
        gone[NOTED:] = [f"and {len(gone) - NOTED} more"]
    if unseen or gone:
        yield "\n".join(f"- {line}" for line in [*unseen, *gone])


def _bars(document: Document) -> Iterator[RivalComparison]:
    """A comparison for each requirement: by its worst row if it was missed, otherwise by the nearest."""
    for hold in document["holds"]:
        missed, rows = hold["missed"], hold["rows"]
        if worst := missed[0] if missed else hold["nearest"]:
            yield RivalComparison(
                document["scenario"], hold["what"], worst["value"], worst["bound"],
                less=(worst["value"] > worst["bound"]) is bool(missed), case=f"{len(missed)} of {rows}",
            )  # fmt: skip


def _ahead(scenario: str, rows: Sequence[Document], swept: tuple[str, ...]) -> Iterator[RivalComparison]:
    """Compares the p2pcast row with each other row of the same case, or of cases that differ in the system alone."""
    alike = [key for key in swept if key != SYSTEM]
    groups: dict[tuple[Any, ...], list[Document]] = {}
    for row in rows:
        if isinstance(row.get(TIME), int | float) and SYSTEM in row and not row.get("simulated"):
            groups.setdefault(tuple(str(row.get(key)) for key in alike), []).append(row)
    for case, some in groups.items():
        place = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in zip(alike, case, strict=True))
        for ours in (row for row in some if row[SYSTEM] == OURS):
            for row in some:
                if not str(row[SYSTEM]).startswith(OURS):
                    yield RivalComparison(
                        scenario, "time to the last, s", ours[TIME], row[TIME], str(row[SYSTEM]), case=place
                    )
