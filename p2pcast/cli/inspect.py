"""``p2pcast inspect``: show a delta file, a checkpoint folder, a state folder, or the change between two folders."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from p2pcast import offline
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.checkpoint import Checkpoint, SafetensorsFile
from p2pcast.cli.change_report import change_lines, draw, step_lines
from p2pcast.cli.options import console
from p2pcast.cli.state_folder import describe_state, show_state
from p2pcast.codec.cell import CODEC_NAMES
from p2pcast.codec.layout import Layout
from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError
from p2pcast.ground.progress_bar import ProgressMeter
from p2pcast.inspection import sparsity_report
from p2pcast.inspection.png_figure import require_matplotlib
from p2pcast.inspection.store_inspection import is_state_folder

_ROWS = 40
_NAME = 40
"""Most columns for a tensor's name."""


@click.command("inspect")
@click.argument("path", metavar="FILE|DIR", type=click.Path(path_type=Path))
@click.argument("new", metavar="[NEW]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="For a .p2pd file: folder with the delta's base, for statistics that need the old values.",
)
@click.option(
    "--lr",
    "learning_rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="η",
    help="Learning rate, for PULSE's threshold: 256·η for bf16, other multiples for other types.",
)
@click.option(
    "--codec",
    type=click.Choice(["auto", "context", "flat", "dense"]),
    default="auto",
    help="For two folders: codec of the delta between them.",
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="File for plots of the change.")
@click.option("--all", "all_rows", is_flag=True, help=f"All tensors, instead of the first {_ROWS}.")
@click.option("--digest", is_flag=True, help="For a checkpoint: its state digest too, which takes reading every byte.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def inspect(
    path: Path,
    new: Path | None,
    base: Path | None,
    learning_rate: float | None,
    codec: str,
    plot: Path | None,
    all_rows: bool,
    digest: bool,
    as_json: bool,
) -> None:
    """Show the contents of a .p2pd file, a .safetensors file, a checkpoint folder, or the state folder of a hub or
    peer: versions, sizes, codecs and tensors. Every byte of a .p2pd file is verified.

    For a .p2pd file, and for two folders (DIR NEW), also show the change. It tells which tensors, how many values, how
    many ULPs, how many bits, how large the weights are, and notable findings.

    \b
    Examples:
      p2pcast inspect 1-2.p2pd --base step_1
      p2pcast inspect step_1 step_2 --lr 1e-6 --plot change.png
      p2pcast inspect ~/.local/state/p2pcast/hub
    """
    if plot is not None:
        require_matplotlib()
    with explained("read", path):
        os.stat(path)
    with ProgressMeter("inspect") as seen:
        if new is not None:
            if base is not None:
                raise UsageError("--base needs a .p2pd file; with two folders, the first one is the base")
            document = describe_change(path, new, codec=codec, learning_rate=learning_rate, seen=seen)
        elif is_state_folder(path):
            document = describe_state(path)
        elif path.is_dir():
            document = describe_folder(path, with_digest=digest)
        else:
            document = describe_file(path, with_digest=digest, base=base, learning_rate=learning_rate, seen=seen)
    changes = "findings" in document
    if not changes and (base, learning_rate, plot) != (None, None, None):
        raise UsageError(
            f"{path} alone is no change: --base, --lr and --plot need a .p2pd file; --lr and --plot also take two "
            "folders"
        )
    if plot is not None:
        draw(document, plot)
    if as_json:
        click.echo(json.dumps(document))
    else:
        (show_state if document["kind"] == "state" else _show)(document, None if all_rows else _ROWS)


def describe_file(
    path: Path,
    *,
    with_digest: bool = False,
    base: Path | None = None,
    learning_rate: float | None = None,
    seen: sparsity_report.Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Return a JSON document that describes a .p2pd or .safetensors file. ``base``, ``learning_rate``: see
    ``sparsity_report``. Raises IntegrityError, LocalError.
    """
    with explained("read", path), path.open("rb") as file:
        magic = file.read(4)
    if magic == b"p2pd":
        return _describe_delta(path, base, learning_rate, seen)
    if path.suffix == ".safetensors":
        return _describe_checkpoint(
            Checkpoint(path.parent, [SafetensorsFile(path)]), path, with_digest, small_files=False
        )
    if not magic:
        raise IntegrityError(f"{path} is empty: neither a .p2pd nor a .safetensors file")
    raise LocalError(f"{path}: neither a .p2pd file, nor a .safetensors file, nor a folder with one")


def describe_folder(path: Path, *, with_digest: bool = False) -> dict[str, Any]:
    """Return a JSON document that describes a checkpoint folder. Raises IntegrityError, LocalError."""
    return _describe_checkpoint(Checkpoint.open(path), path, with_digest, small_files=True)


def _describe_checkpoint(checkpoint: Checkpoint, path: Path, with_digest: bool, *, small_files: bool) -> dict[str, Any]:
    layout = checkpoint.layout()
    files = checkpoint.small_files() if small_files else {}
    document: dict[str, Any] = {
        "kind": "checkpoint",
        "path": str(path),
        **_layout_facts(layout),
        "weight_files": [{"name": f.path.name, "bytes": f.nbytes} for f in checkpoint.files],
        "files": [{"path": name, "bytes": len(contents)} for name, contents in sorted(files.items())],
        "skipped": [{"path": name, "reason": why} for name, why in checkpoint.skipped],
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes} for t in layout.tensors
        ],
    }
    if with_digest:
        document["state"] = f"{offline.state_digest(checkpoint):016x}"
    return document


def _layout_facts(layout: Layout) -> dict[str, Any]:
    dtypes = Counter(t.dtype for t in layout.tensors)
    return {
        "layout_id": layout.layout_id.hex(),
        "params": layout.params,
        "dense_bytes": layout.nbytes,
        "cells": len(layout.cells),
        "dtypes": dict(sorted(dtypes.items())),
    }


def describe_change(
    old: Path,
    new: Path,
    *,
    codec: str = "auto",
    learning_rate: float | None = None,
    seen: sparsity_report.Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Return a JSON document that describes the change from folder ``old`` to folder ``new``; ``bytes`` counts the
    delta's cells. Raises IntegrityError, LocalError.
    """
    was, now = Checkpoint.open(old), Checkpoint.open(new)
    layout = was.layout()
    offline.require_same(layout, now.layout(), f"{new} against {old}")
    codecs: dict[str, dict[str, int]] = {}
    looks = _tallied(sparsity_report.compare_folders(was, now, layout, codec, learning_rate, progress=seen), codecs)
    found = sparsity_report.report(layout, looks, learning_rate)
    total = found["total"]
    return {
        "kind": "change",
        "path": str(old),
        "new": str(new),
        "bytes": total["bytes"],
        "ratio_to_dense": layout.nbytes / total["bytes"] if total["bytes"] else None,
        **_layout_facts(layout),
        "cells_changed": sum(entry["cells"] for entry in codecs.values()),
        "changed": total["changed"],
        "changed_exact": True,
        "codecs": codecs,
        **found,
    }


def _tallied(
    looks: Iterable[sparsity_report.CellCounts], codecs: dict[str, dict[str, int]]
) -> Iterator[sparsity_report.CellCounts]:
    for look in looks:
        if look.codec is not None:
            entry = codecs.setdefault(CODEC_NAMES.get(look.codec, str(look.codec)), {"cells": 0, "bytes": 0})
            entry["cells"] += 1
            entry["bytes"] += look.nbytes
        yield look


def _describe_delta(
    path: Path, base: Path | None, learning_rate: float | None, seen: sparsity_report.Progress
) -> dict[str, Any]:
    with P2pdFile.open(path) as file:
        file.verify_pieces()
        layout, manifest = file.layout, file.manifest
        held = None if base is None else Checkpoint.open(base)
        if held is not None:
            offline.require_same(layout, held.layout(), f"wrong base: {base} against {path}")
        codecs: dict[str, dict[str, int]] = {}
        looks = _tallied(sparsity_report.examine_delta(file, held, learning_rate, progress=seen), codecs)
        found = sparsity_report.report(layout, looks, learning_rate)
        return {
            "kind": manifest.kind,
            "path": str(path),
            "base": None if manifest.base is None else str(manifest.base),
            "version": str(manifest.version),
            "bytes": file.nbytes,
            "log_bytes": manifest.log,
            "ratio_to_dense": layout.nbytes / file.nbytes,
            **_layout_facts(layout),
            "cells_changed": manifest.cells,
            "changed": found["total"]["changed"],
            "changed_exact": found["total"]["exact"],
            "codecs": codecs,
            "pieces": manifest.pieces,
            "piece_bytes": file.assembly.open.piece,
            "batches": manifest.batches,
            "base_state": f"{offline.base_state(file):016x}",
            "state": f"{manifest.state:016x}",
            "run": manifest.run.hex(),
            "key": file.public.hex(),
            "artifact": manifest.artifact.hex(),
            "files": [{"path": f.path, "bytes": f.size, "in_base": f.offset is None} for f in manifest.files],
            **found,
        }


def _show(document: dict[str, Any], rows: int | None) -> None:
    out = console()
    listed = {
        "tensors",
        "files",
        "skipped",
        "weight_files",
        "codecs",
        "changed_exact",
        "total",
        "findings",
        "learning_rate_given",
    }
    facts = Table(show_header=False, box=None)
    facts.add_column()
    facts.add_column(overflow="fold")
    for key, value in document.items():
        if key not in listed and value is not None:
            facts.add_row(f"[bold]{key.replace('_', ' ')}", escape(_text(value)))
    out.print(facts)
    for title in ("codecs", "weight_files", "files", "skipped"):
        entries = document.get(title)
        if entries:
            entries = [{"codec": k, **v} for k, v in entries.items()] if isinstance(entries, dict) else entries
            out.print(_table(title.replace("_", " "), entries))
    changes = "findings" in document
    tensors = document["tensors"]
    lines = change_lines(document) if changes else [{k: _text(v) for k, v in t.items()} for t in tensors]
    if lines:
        out.print(_table("tensors, by bytes" if changes else "tensors", lines[:rows]))
    if rows is not None and len(lines) > rows:
        out.print(f"… and {len(lines) - rows} more; --all shows them")
    if changes:
        steps = step_lines(document["total"])
        if steps:
            out.print(_table("steps, in ULPs", steps))
        for sentence in document["findings"]:
            out.print(f"• {escape(_text(sentence))}")


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for key, value in entries[0].items():
        right = isinstance(value, int) or (isinstance(value, str) and value[-1:] in "0123456789%–")
        # Names get their full width; instead, the headings of narrow number columns wrap.
        least = min(_NAME, max(len(str(e[key])) for e in entries)) if key == "name" else None
        table.add_column(
            key.replace("_", " "),
            justify="right" if right and key != "name" else "left",
            overflow="fold",
            min_width=least,
        )
    for entry in entries:
        table.add_row(*(escape(_text(v)) for v in entry.values()))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}" if value >= 0.1 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    # A tensor's name may hold any text: remove control characters, which a terminal would obey.
    return "".join(c if c.isprintable() else "�" for c in str(value))
