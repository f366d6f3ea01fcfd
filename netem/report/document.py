"""docs/benchmarks.md, written from the documents of parts and scenarios. Pure: the same JSON gives the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netem.report.lab_sections import lab
from netem.report.parts import PARTS
from netem.report.section_text import Picture, RivalComparison, Section, figure, table

Kept = Mapping[str, Any]
FOLDER: Final = "benchmarks"
"""Folder of the plots, beside the text."""


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """``pictures``: the plots that the text shows; the caller draws them."""

    text: str
    pictures: Sequence[Picture]


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
                f"the stored document lacks {error}: another version of p2pcast wrote it; run `make bench ONLY={name}`"
            )
    scenarios = {document["scenario"]: lab(document) for document in sorted(labs, key=lambda each: each["scenario"])}
    compared = [loss for section in [*sections.values(), *scenarios.values()] for loss in section.compared]
    blocks = [
        "# Benchmarks",
        "`make bench` writes this file from its measurements; do not edit it. `make bench` takes half an hour on four "
        "cores. `make bench QUICK=1` takes some minutes and gives coarse figures. `make bench ONLY=codec` measures "
        "one part, and `make bench WRITE=1` writes the text alone. The measurements are kept in `bench-out/`, one "
        "JSON file a part, and in `lab-out/`, one a scenario (`p2pcast lab SCENARIO`). "
        "[measurements.md](notes/measurements.md) explains misses and attempted improvements.",
        *_machines(measured, labs),
        *_busy(measured, labs),
        *_lost(compared),
    ]  # fmt: skip
    for name, section in sections.items():
        kept = measured[name]
        blocks += [f"## {section.title}", _ran(kept), *section.blocks, *_shown(section)]
    for name, section in scenarios.items():
        blocks += [f"## {section.title}", *section.blocks]
        blocks += [f"![{name}]({FOLDER}/{file})" for file in lab_plots.get(name, ())]
    if missing := [name for name in PARTS if name not in measured]:
        blocks += ["## Not measured", "\n".join(f"- {name}: {why[name]}" for name in missing)]
    text = "\n\n".join(blocks) + "\n"
    return BenchmarkReport(text, [picture for section in sections.values() for picture in section.pictures])


def _ran(kept: Kept) -> str:
    ended = "" if kept["exit_code"] == 0 else f"; it ended with exit code {kept['exit_code']}"
    quick = " (quick, so coarse)" if kept["quick"] else ""
    return (
        f"`{kept['command']}`{quick}, {kept['began']}, {kept['took_s']:.0f} s, load at its beginning "
        f"{figure(kept['machine']['load'])}{ended}."
    )


def _shown(section: Section) -> list[str]:
    return [f"![{picture.title}]({FOLDER}/{picture.file}.png)" for picture in section.pictures]


def _machines(measured: Mapping[str, Kept], labs: Sequence[Kept]) -> list[str]:
    """Each machine with its package versions once, with the parts that ran on it."""
    on: dict[tuple[str, str], list[str]] = {}
    for name, kept in [*measured.items(), *((f"lab {each['scenario']}", each) for each in labs)]:
        m = kept["machine"]
        machine = f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 1e9:.0f} GB, {m['kernel']}"
        versions = ", ".join(f"{package} {number}" for package, number in kept["versions"].items())
        on.setdefault((machine, versions), []).append(name)
    if len(on) == 1:
        ((machine, versions),) = on
        return [f"Machine: {machine}. Versions: {versions}."]
    return [
        f"Machine of {', '.join(names)}: {machine}. Versions: {versions}." for (machine, versions), names in on.items()
    ]


def _busy(measured: Mapping[str, Kept], labs: Sequence[Kept]) -> list[str]:
    every = [*measured.items(), *((f"lab {each['scenario']}", each) for each in labs)]
    names = [name for name, kept in every if kept["machine"]["load"] > kept["machine"]["cores"]]
    if not names:
        return []
    return [
        "More programs than cores wanted to run when these parts began, so other programs affect their times: "
        f"{', '.join(names)}."
    ]


def _lost(compared: Sequence[RivalComparison]) -> list[str]:
    behind = [loss for loss in compared if loss.lost and loss.rival is not None]
    missed = [loss for loss in compared if loss.lost and loss.rival is None]
    races, bars = (sum((loss.rival is None) is bar for loss in compared) for bar in (False, True))
    blocks = ["## Where p2pcast is behind"]
    headings = ["where", "what", "p2pcast", "ahead", "by"]
    blocks.append(
        f"p2pcast loses {len(behind)} of {races} comparisons with a rival or a limit, computed from the data. All "
        "losses:"
    )
    if behind:
        blocks.append(table(headings, (loss.cells() for loss in behind)))
    blocks.append(f"Of {bars} bars, {len(missed)} missed:")
    if missed:
        blocks.append(table([*headings[:3], "bound", "by"], (loss.cells() for loss in missed)))
    return blocks
