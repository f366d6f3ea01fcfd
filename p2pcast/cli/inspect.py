"""``p2pcast inspect``: what is in a delta file, or in a checkpoint folder."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from p2pcast import offline
from p2pcast.artifact.p2pd import P2pdFile
from p2pcast.checkpoint import Checkpoint, SafetensorsFile
from p2pcast.codec.cell import CODEC_NAMES, FLAT
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.store.files import explained

_ROWS = 40
_FLAT_COUNT = slice(4, 8)
"""Where a ``flat`` payload says how many words it changes (docs/delta-format.md, section 3)."""


@click.command("inspect")
@click.argument("path", metavar="FILE|DIR", type=click.Path(path_type=Path))
@click.option("--all", "all_rows", is_flag=True, help=f"Every tensor, not only the first {_ROWS}.")
@click.option("--digest", is_flag=True, help="For a folder: also its state digest, which reads all of it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def inspect(path: Path, all_rows: bool, digest: bool, as_json: bool) -> None:
    """Show versions, sizes, codecs and tensors of a .p2pd file (every byte of which is checked), a .safetensors file or a checkpoint folder."""
    with explained("read", path):
        os.stat(path)
    document = describe_folder(path, with_digest=digest) if path.is_dir() else describe_file(path, with_digest=digest)
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show(document, None if all_rows else _ROWS)


def describe_file(path: Path, *, with_digest: bool = False) -> dict[str, Any]:
    """A .p2pd or .safetensors file as a JSON document. Raises IntegrityError, LocalError."""
    with explained("read", path), path.open("rb") as file:
        magic = file.read(4)
    if magic == b"p2pd":
        return _describe_delta(path)
    if path.suffix == ".safetensors":
        return _describe_checkpoint(Checkpoint(path.parent, [SafetensorsFile(path)]), path, with_digest, small_files=False)
    if not magic:
        raise IntegrityError(f"{path}: empty, so neither a .p2pd nor a .safetensors file")
    raise LocalError(f"{path}: neither a .p2pd nor a .safetensors file, nor a folder with one")


def describe_folder(path: Path, *, with_digest: bool = False) -> dict[str, Any]:
    """A checkpoint folder as a JSON document. Raises IntegrityError, LocalError."""
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
        "tensors": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes} for t in layout.tensors],
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


def _describe_delta(path: Path) -> dict[str, Any]:
    with P2pdFile.open(path) as file:
        file.verify_pieces()
        layout, manifest = file.layout, file.manifest
        codecs: dict[str, dict[str, int]] = {}
        rows: list[dict[str, Any]] = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "words": t.words, "bytes": 0, "changed": 0, "exact": True}
            for t in layout.tensors
        ]
        for placed in file.assembly.directory:
            cell = layout.cells[placed.cell]
            name = CODEC_NAMES.get(placed.codec, str(placed.codec))
            entry = codecs.setdefault(name, {"cells": 0, "bytes": 0})
            entry["cells"] += 1
            entry["bytes"] += placed.bytes
            row = rows[cell.tensor]
            row["bytes"] += placed.bytes
            if placed.codec == FLAT:
                row["changed"] += int.from_bytes(file.read(placed.offset, min(8, placed.bytes))[_FLAT_COUNT], "little")
            else:  # such a cell states all its words, changed or not
                row["changed"] += cell.words
                row["exact"] = False
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
            "changed": sum(row["changed"] for row in rows),
            "changed_exact": all(row["exact"] for row in rows),
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
            "tensors": rows,
        }


def _show(document: dict[str, Any], rows: int | None) -> None:
    console = Console(highlight=False)
    listed = {"tensors", "files", "skipped", "weight_files", "codecs", "changed_exact"}
    facts = Table(show_header=False, box=None)
    facts.add_column()
    facts.add_column(overflow="fold")
    for key, value in document.items():
        if key not in listed:
            facts.add_row(f"[bold]{key.replace('_', ' ')}", escape(_text(value)))
    console.print(facts)
    for title in ("codecs", "weight_files", "files", "skipped"):
        entries = document.get(title)
        if entries:
            entries = [{"codec": k, **v} for k, v in entries.items()] if isinstance(entries, dict) else entries
            console.print(_table(title.replace("_", " "), entries))
    tensors = document["tensors"]
    if document["kind"] == "checkpoint":
        lines = [{k: _text(v) for k, v in t.items()} for t in tensors]
    else:
        lines = [
            {
                "name": t["name"],
                "dtype": t["dtype"],
                "shape": _text(t["shape"]),
                "changed": f"{'' if t['exact'] else '≤ '}{t['changed']:,}",
                "share": f"{100 * t['changed'] / t['words']:.3f} %",
                "bytes": _text(t["bytes"]),
            }
            for t in tensors
            if t["bytes"]
        ]
    if lines:
        console.print(_table("tensors", lines[:rows]))
    if rows is not None and len(lines) > rows:
        console.print(f"… and {len(lines) - rows} more; --all shows them")


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for key, value in entries[0].items():
        table.add_column(key.replace("_", " "), justify="right" if isinstance(value, int) else "left", overflow="fold")
    for entry in entries:
        table.add_row(*(escape(_text(v)) for v in entry.values()))
    return table


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    # A tensor's name is anybody's text: it may not drive the terminal.
    return "".join(c if c.isprintable() else "�" for c in str(value))
