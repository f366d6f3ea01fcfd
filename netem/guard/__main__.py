"""``python -m netem.guard``: every bar in its short form, with this tree's code and the baseline's in turns. ``make
guard`` runs it.

Exit code 0: no figure is worse. 1: a figure is worse, or a bar failed. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from netem.bench import step_run
from netem.bench.figures_text import Columns
from netem.bench.rendering import table
from netem.guard.guarded_figures import BARS, FORM, MEMORY, Bar, measured
from netem.guard.paired_ratios import FEWEST, RatioSpread, against, row
from netem.guard.source_trees import ROOT, SourceTree, baseline, ours
from netem.lab.machine import machine, versions
from p2pcast.cli.options import console
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import LocalError, P2PCastError, UsageError

RECORD: Final = ROOT / "docs" / "benchmarks" / "guard.json"

Document = dict[str, Any]


def main() -> None:
    try:
        sys.exit(_run(_options()))
    except P2PCastError as error:
        print(f"guard: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _options() -> argparse.Namespace:
    words = argparse.ArgumentParser(
        prog="python -m netem.guard",
        description="Every bar in its short form, in turns with a baseline within the same minutes.",
    )
    words.add_argument(
        "--pairs",
        type=int,
        default=FEWEST,
        help=f"Runs of each bar with either code; fewer than {FEWEST} give no verdict.",
    )
    words.add_argument(
        "--only", action="append", default=[], metavar="BAR", help=f"Bar to run: one of {', '.join(BARS)}; repeatable."
    )
    words.add_argument(
        "--baseline", metavar="WHAT", help="Source archive, source folder or revision.  [default: the pinned archive]"
    )
    words.add_argument("--record", type=Path, default=RECORD, help="Earlier record, shown beside this run.")
    words.add_argument("--write", action="store_true", help="Replace the record with this run's figures.")
    words.add_argument("--json", type=Path, metavar="FILE", help="Further file for this run's figures.")
    return words.parse_args()


def _run(given: argparse.Namespace) -> int:
    if strange := [name for name in given.only if name not in BARS]:
        raise UsageError(f"there is no bar {strange[0]!r}; the bars are {', '.join(BARS)}")
    if given.pairs < 1:
        raise UsageError("--pairs: 1 at least")
    bars = [bar for name, bar in BARS.items() if not given.only or name in given.only]
    before = recorded(given.record)
    with tempfile.TemporaryDirectory(prefix="p2pcast-guard-", dir=MEMORY if Path(MEMORY).is_dir() else None) as place:
        trees = (ours(), baseline(given.baseline))
        document = _measured(bars, trees, given.pairs, Path(place))
    compared(document, before)
    _print(document, before)
    if given.json is not None:
        atomic_write(given.json, json.dumps(document, indent=1).encode() + b"\n")
    if given.write:
        kept = {} if before is None or not _same_form(document, before) else before["figures"]
        atomic_write(
            given.record, json.dumps(document | {"figures": kept | document["figures"]}, indent=1).encode() + b"\n"
        )
    return (
        1
        if document["failed"] or any("worse" in (f["verdict"], f.get("since")) for f in document["figures"].values())
        else 0
    )


def recorded(path: Path) -> Document | None:
    """Raises LocalError for a file of another format."""
    if not path.exists():
        return None
    try:
        with explained("read", path):
            found: Document = json.loads(path.read_text())
        found["figures"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise LocalError(f"{path} is not a record of `make guard`: restore it, or move it away") from None
    return found


def _measured(bars: Sequence[Bar], trees: tuple[SourceTree, SourceTree], pairs: int, folder: Path) -> Document:
    document: Document = {
        "form": FORM,
        "commit": trees[0].ident,
        "baseline": trees[1].name,
        "baseline_ident": trees[1].ident,
        "machine": machine(),
        "versions": versions(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "figures": {},
        "left_out": {},
        "failed": {},
    }
    began = time.monotonic()
    for tree in trees:
        tree.warm(folder)
    for bar in bars:
        if (why := step_run.lacks(bar.needs)) is not None:
            document["left_out"][bar.name] = why
            _report(f"{bar.name}: left out, {why}")
            continue
        clock = time.monotonic()
        try:
            document["figures"] |= _paired(bar, trees, 1 if bar.once else pairs, folder)
            _report(f"{bar.name}: {time.monotonic() - clock:.0f} s")
        except (LocalError, LookupError, ValueError) as error:
            document["failed"][bar.name] = str(error) or repr(error)
            _report(f"{bar.name}: failed, {error!r}")
    document["took_s"] = round(time.monotonic() - began, 1)
    return document


def _paired(bar: Bar, trees: tuple[SourceTree, SourceTree], pairs: int, folder: Path) -> Document:
    """In turns (A B, B A, A B, …), so that a change of the machine affects both codes equally."""
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for number in range(pairs):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            found[which].append(_once_more(bar, trees[which], folder / bar.name))
    return {
        f"{bar.name}: {name}": row(figure, [run[name] for run in found[0]], [run[name] for run in found[1]])
        for name, figure in bar.figures.items()
    }


def _once_more(bar: Bar, tree: SourceTree, folder: Path) -> dict[str, float]:
    """One run, repeated once after a failure: a bench may miss a deadline on a busy machine. Raises LocalError."""
    try:
        return measured(bar, tree, folder)
    except LocalError as error:
        _report(f"{bar.name}: {error}\n{bar.name}: repeated with {tree.name}")
        return measured(bar, tree, folder)


def compared(document: Document, before: Document | None) -> None:
    """Add ``since`` to each figure of a record with the same form and baseline."""
    if before is None or not _same_form(document, before):
        return
    for key, figure in document["figures"].items():
        if (was := before["figures"].get(key)) is not None:
            bar, _, name = key.partition(": ")
            figure["since"] = against(
                BARS[bar].figures[name], RatioSpread(*figure["ratio"]), RatioSpread(*was["ratio"])
            )


def _same_form(document: Document, before: Document) -> bool:
    return all(document[key] == before.get(key) for key in ("form", "baseline_ident"))


def _print(document: Document, before: Document | None) -> None:
    same = before is not None and _same_form(document, before)
    was = before["figures"] if same and before is not None else {}
    rows = [
        {
            **figure, "figure": key, "quartiles": figure["ratio"][1:], "since": figure.get("since"),
            "was": was.get(key, {"ratio": [None]})["ratio"][0],
        }
        for key, figure in document["figures"].items()
    ]  # fmt: skip
    columns: Columns = [
        ("figure", "figure"),
        ("", "unit"),
        ("ours", lambda row: _number(row["ours"])),
        (document["baseline"], lambda row: _number(row["baseline"])),
        ("ratio", "{ratio[0]:.3f}"),
        ("quartiles", "{quartiles[0]:.3f} to {quartiles[1]:.3f}"),
        ("beside it", "verdict"),
        ("recorded", "{was:.3f}"),
        ("since then", "since"),
    ]
    out = console()
    out.print(table(rows, columns))
    out.print(
        f"Ratio: ours ({document['commit'] or 'no commit'}) over {document['baseline']}, of runs that followed each "
        f"other; {document['took_s']:.0f} s. Worse or better: both quartiles more than 5 % from 1, of {FEWEST} pairs "
        "or more; sizes: any difference."
    )
    if before is not None:
        what = f"Recorded: {before.get('commit')}, {before.get('began')}, load {before.get('machine', {}).get('load')}."
        out.print(what if same else f"{what} Another form or baseline, so nothing is compared with it.")
    for name, why in (document["left_out"] | document["failed"]).items():
        out.print(f"{name}: {'left out' if name in document['left_out'] else 'FAILED'}, {why}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
