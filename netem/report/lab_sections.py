"""Report sections about lab scenarios, from the documents that ``p2pcast lab`` writes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from netem.lab.scenario_report import origin
from netem.report.section_text import RivalComparison, Section, figure, table

Document = Mapping[str, Any]
SYSTEM, TIME, OURS = "system", "all_s", "p2pcast"
SHOWN: Final = 40
"""Rows shown of a table; the JSON holds all."""
NOTED: Final = 6
"""Number of skipped or failed cases that are named."""


def lab(document: Document) -> Section:
    rows, reference = list(document["rows"]), list(document["reference"])
    columns = dict(document["columns"]) or {key: key for row in rows for key in row if key != "case"}
    headings = [*columns.values(), *(["from"] if reference else [])]
    shown = [[row.get(key) for key in columns] + ([origin(row)] if reference else []) for row in rows[:SHOWN]]
    shown += [[row.get(key) for key in columns] + [row.get("source", "paper")] for row in reference]
    paper = f" ({document['paper']})" if document["paper"] else ""
    blocks = [f"{_capital(document['what'])}{paper}."]
    if document["scale"]:
        blocks.append(f"Scale: {document['scale']}.")
    blocks.append(
        f"`{document.get('command') or 'p2pcast lab ' + document['scenario']}`, backend {document['backend']}, "
        f"{document['began']}, {document['took_s']:.0f} s, load at its beginning "
        f"{figure(document['machine']['load'])}; {len(document['run'])} of {document['cases']} cases."
    )
    if shown:
        blocks.append(table(headings, shown))
    if len(rows) > SHOWN:
        blocks.append(f"{len(rows) - SHOWN} more rows are in the JSON.")
    if said := list(_said(document)):
        blocks.append("\n".join(f"- {line}" for line in said))
    compared = [*_ahead(document["scenario"], rows, tuple(document["sweep"])), *_missed(document)]
    return Section(f"Lab: {document['scenario']}", blocks, compared)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _said(document: Document) -> Iterator[str]:
    """Requirements met and missed, and skipped cases with their reasons."""
    for hold in document["holds"]:
        if hold["held"] is None:
            yield f"not shown: {hold['what']} (no row to look at)"
        elif hold["held"]:
            yield f"held: {hold['what']}"
        else:
            yield f"**missed**: {hold['what']} ({len(hold['missed'])} of {hold['rows']})"
    gone = [f"case {c['case']} left out: {off}" for c in document["calibrations"] for off in c["off"]]
    gone += [f"case {failed['case']} failed: {failed['why']}" for failed in document["failed"]]
    yield from gone[:NOTED]
    if len(gone) > NOTED:
        yield f"and {len(gone) - NOTED} more"


def _missed(document: Document) -> Iterator[RivalComparison]:
    for hold in document["holds"]:
        if hold["missed"]:
            worst = hold["missed"][0]
            what = f"{hold['what']} ({len(hold['missed'])} of {hold['rows']}; the worst)"
            yield RivalComparison(
                document["scenario"], what, worst["value"], worst["bound"], less=worst["value"] > worst["bound"]
            )


def _ahead(scenario: str, rows: Sequence[Document], swept: tuple[str, ...]) -> Iterator[RivalComparison]:
    """Compares the p2pcast row with each other row of the same case, or of cases that differ in the system alone."""
    alike = [key for key in swept if key != SYSTEM]
    groups: dict[tuple[Any, ...], list[Document]] = {}
    for row in rows:
        if isinstance(row.get(TIME), int | float) and SYSTEM in row and not row.get("simulated"):
            groups.setdefault(tuple(str(row.get(key)) for key in alike), []).append(row)
    for case, some in groups.items():
        place = ", ".join(f"{key} {value}" for key, value in zip(alike, case, strict=True))
        for ours in (row for row in some if row[SYSTEM] == OURS):
            for row in some:
                if not str(row[SYSTEM]).startswith(OURS):
                    what = f"time to the last in s{f', {place}' if place else ''}"
                    yield RivalComparison(scenario, what, ours[TIME], row[TIME], str(row[SYSTEM]))
