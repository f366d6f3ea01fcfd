"""docs/benchmarks.md, written from the documents of parts and scenarios. Pure: the same JSON gives the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netem.report.lab_sections import lab
from netem.report.parts import PARTS
from netem.report.section_text import Figures, Picture, RivalComparison, Section, merged, table

Kept = Mapping[str, Any]
FOLDER: Final = "benchmarks"
"""Folder of the plots and data, next to the text."""
FIRST: Final = "broadcast-state"
"""The plot at the top of the page."""


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """``pictures``: the plots that the text shows; the caller draws them. ``data``: tables in CSV by file name."""

    text: str
    pictures: Sequence[Picture]
    data: Mapping[str, str]


def write(parts: Mapping[str, Kept], labs: Sequence[Kept], lab_plots: Mapping[str, Sequence[str]]) -> BenchmarkReport:
    """``parts``: documents by part name. ``labs``: scenario documents. ``lab_plots``: plot names by scenario."""
    why = {name: parts.get(name, {}).get("why", "not yet") for name in PARTS}
    sections, measured = {}, {}
    for name in PARTS:
        if "document" not in (kept := parts.get(name, {})):
            continue
        try:
            sections[name] = PARTS[name].section(kept["document"])
            measured[name] = kept
        except KeyError as error:
            why[name] = (
                f"the stored document has no {error}: another version of p2pcast wrote it; run `make bench ONLY={name}`"
            )
    documents = {document["scenario"]: document for document in sorted(labs, key=lambda each: each["scenario"])}
    scenarios = {name: lab(document) for name, document in documents.items()}
    every = [*sections.values(), *scenarios.values()]
    compared = [one for section in every for one in section.compared]
    pictures = [picture for section in sections.values() for picture in section.pictures]
    best = [row for section in every for row in section.best]
    blocks = [
        "# Benchmarks",
        *([table(["what p2pcast does well", "p2pcast", "others"], best)] if best else []),
        *map(_shown, (picture for picture in pictures if picture.file == FIRST)),
        "*Ideal* is the payload at the rate of one peer's link. *Bars* are targets set before the measurement; those "
        "of a lab are `holds` in `netem/scenarios`. The CSV files after a section's command have all its rows. "
        "[Measurements](notes/measurements.md) has further figures.",
        *_machines(measured, labs),
        *_busy(measured, labs),
        *_lost(compared),
    ]
    for name, section in sections.items():
        shown = [_shown(picture) for picture in section.pictures if picture.file != FIRST]
        blocks += [f"## {section.title}", *section.blocks, *shown, _ran(measured[name], section)]
    for name, section in scenarios.items():
        shown = [f"![{name}]({FOLDER}/{file})" for file in lab_plots.get(name, ())]
        blocks += [f"## {section.title}", *section.blocks, *shown, _ran_lab(documents[name], section)]
    if missing := [name for name in PARTS if name not in measured]:
        blocks += ["## Not measured", "\n".join(f"- {name}: {why[name]}" for name in missing)]
    tables = {name: table for section in every for name, table in section.data.items()} | {"losses": _losses(compared)}
    data = {f"{name}.csv": each.csv() for name, each in tables.items()}
    return BenchmarkReport("\n\n".join(blocks) + "\n", pictures, data)


def _ran(kept: Kept, section: Section) -> str:
    ended = "" if kept["exit_code"] == 0 else f"; exit code {kept['exit_code']}"
    quick = " (quick, so coarse)" if kept["quick"] else ""
    return f"`{kept['command']}`{quick}, {_when(kept)}{ended}.{_files(section)}"


def _ran_lab(document: Kept, section: Section) -> str:
    ran = "" if len(document["run"]) == document["cases"] else f"; {len(document['run'])} of {document['cases']} cases"
    command = document.get("command") or f"p2pcast lab {document['scenario']}"
    return f"`{command}`, {document['backend']}, {_when(document)}{ran}.{_files(section)}"


def _when(kept: Kept) -> str:
    return f"{kept['began'][:10]}, {kept['took_s']:.0f} s"


def _files(section: Section) -> str:
    links = ", ".join(f"[{name}.csv]({FOLDER}/{name}.csv)" for name in section.data)
    return f" {links}." if links else ""


def _shown(picture: Picture) -> str:
    return f"![{picture.title}]({FOLDER}/{picture.file}.png)"


def _machines(measured: Mapping[str, Kept], labs: Sequence[Kept]) -> list[str]:
    """Each machine once. All but the most frequent one have the parts that ran on it, and the versions that differ."""
    on: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for name, kept in [*measured.items(), *((f"lab {each['scenario']}", each) for each in labs)]:
        m = kept["machine"]
        machine = f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 1e9:.0f} GB, {m['kernel']}"
        on.setdefault((machine, tuple(kept["versions"].items())), []).append(name)
    lines: list[str] = []
    usual: tuple[tuple[str, str], ...] = ()
    for (machine, versions), names in sorted(on.items(), key=lambda each: -len(each[1])):
        numbers = ", ".join(f"{package} {number}" for package, number in versions if (package, number) not in usual)
        lines.append(
            f"Machine{' of ' + ', '.join(names) if lines else ''}: {machine}. Versions: {numbers or 'the same'}."
        )
        usual = usual or versions
    return lines


def _busy(measured: Mapping[str, Kept], labs: Sequence[Kept]) -> list[str]:
    every = [*measured.items(), *((f"lab {each['scenario']}", each) for each in labs)]
    names = [name for name, kept in every if kept["machine"]["load"] > kept["machine"]["cores"]]
    busy = "The machine was busy with other programs when these parts began, which affects their times"
    return [f"{busy}: {', '.join(names)}."] if names else []


def _lost(compared: Sequence[RivalComparison]) -> list[str]:
    blocks = ["## Where p2pcast is behind"]
    races, bars = ([one for one in compared if (one.rival is None) is bar] for bar in (False, True))
    behind, missed = ([one for one in some if one.lost] for some in (races, bars))
    headings = ["where", "what", "case", "p2pcast", "ahead", "by, ×"]
    blocks.append(
        f"p2pcast loses {len(behind)} of {len(races)} comparisons with a rival or a limit. A row merges "
        f"cases; [losses.csv]({FOLDER}/losses.csv) has each."
    )
    if behind:
        blocks.append(table(headings, merged(behind)))
    blocks.append(f"Of {len(bars)} bars {len(missed)} were missed:")
    if missed:
        blocks.append(table([*headings[:4], "bar", headings[-1]], merged(missed)))
    return blocks


def _losses(compared: Sequence[RivalComparison]) -> Figures:
    lost = ([one.where, one.what, one.case, one.ours, one.rival or "bar", one.theirs] for one in compared if one.lost)
    return Figures(["where", "what", "case", "p2pcast", "beside", "figure"], list(lost))
