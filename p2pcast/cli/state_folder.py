"""``p2pcast inspect STATE`` and ``p2pcast check STATE``: list and verify the state folder of a hub or a peer."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from p2pcast.artifact.artifact_file import HEADER
from p2pcast.artifact.assembly import Assembly
from p2pcast.cli.options import PATH, console
from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import EXIT_REFUSED, IntegrityError, LocalError
from p2pcast.ground.ordered_map import cores
from p2pcast.ground.progress_bar import ProgressMeter
from p2pcast.inspection.store_inspection import Item, Survey, set_aside, survey
from p2pcast.process.daemon_process import default_shadow
from p2pcast.state.shadow import MARKS_NAME, Shadow, layout_in
from p2pcast.state.stale_shadows import find_stale, remove
from p2pcast.state.version_reader import replay_to, restore_cells
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.artifact_log import ArtifactLog, FileLog
from p2pcast.store.state_format import check as check_format
from p2pcast.store.state_format import state_lock


def describe_state(path: Path) -> dict[str, Any]:
    """Describe a state folder in JSON, using only its records. A daemon may be running. Raises LocalError."""
    check_format(path)
    return _document(survey(path)) | {"kind": "state"}


def _document(found: Survey) -> dict[str, Any]:
    known = ("node", "incarnation", "target", "newest")
    return {
        "path": str(found.root),
        "role": found.role,
        "run": found.run,
        "version": None if found.newest is None else str(found.newest),
        **{key: found.record[key] for key in known if key in found.record and key != "newest"},
        "artifacts": [
            {
                "version": str(i.version),
                "base": None if i.base is None else str(i.base),
                "kind": i.kind,
                "bytes": i.log_bytes,
                "state": f"{i.state:016x}",
                "path": str(i.path),
            }
            for i in sorted(found.items, key=lambda i: (i.version or (0, 0), i.base is None))
            if i.fault is None
        ],
        "partial": [
            {"path": str(path), "version": None if version is None else str(version)} for path, version in found.partial
        ],
        "sizes": found.sizes,
        "faults": [{"path": str(path), "reason": why} for path, why in found.faults],
    }


def show_state(document: dict[str, Any], rows: int | None) -> None:
    out = console()
    facts = Table.grid(padding=(0, 2))
    for key in ("role", "run", "version", "node", "incarnation", "target"):
        if key in document:
            facts.add_row(f"[bold]{key}", escape(str(document[key])))
    for part, size in document["sizes"].items():
        facts.add_row(f"[bold]{part}", f"{size:,} bytes")
    out.print(facts)
    table = Table("version", "base", "kind", "bytes", "state")
    shown = document["artifacts"][-rows:] if rows is not None else document["artifacts"]
    for item in shown:
        table.add_row(item["version"], item["base"] or "–", item["kind"], f"{item['bytes']:,}", item["state"])
    out.print(table)
    if len(shown) < len(document["artifacts"]):
        out.print(f"and {len(document['artifacts']) - len(shown)} older artifacts (--all)")
    for half in document["partial"]:
        out.print(escape(f"partly received: version {half['version'] or 'unknown'}, {half['path']}"))
    for fault in document["faults"]:
        out.print(escape(fault["reason"]))


_REMEDIES = {
    "hub": "start the hub: it asks its peers, or makes a whole state of its shadow; else publish the next version",
    "peer": "start the peer: it fetches what is missing from the hub and from other peers",
    "hub files": "publish the next version with it",
    "peer files": "start the peer, which fetches it",
}


@dataclass(frozen=True, slots=True)
class _Whole:
    assembly: Assembly
    log: ArtifactLog


@click.command()
@click.argument("state", type=PATH)
@click.option(
    "--repair", is_flag=True, help="Repair: damaged files moved to STATE/damaged, corrupt cells of the shadow restored."
)
@click.option("--shadow", type=PATH, help="Folder of the daemon's shadow.  [default: the daemon's default]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def check(state: Path, repair: bool, shadow: Path | None, as_json: bool) -> None:
    """Compare every byte of the state folder STATE of a hub or peer, and of its shadow, with the signed digests. The
    daemon must not be running.

    Exit code 3: the output names damaged files or cells, or what is missing of the newest version. With --repair,
    damaged files move to STATE/damaged, which no daemon reads, and corrupt cells of the shadow are restored from
    artifacts on disk. When a peer's daemon starts, it fetches the cells that remain damaged from other peers.

    Also lists this user's shadows in /dev/shm whose state folder is gone; --repair removes these.
    """
    with explained("read", state):
        state.stat()
    check_format(state)
    survey(state)  # before taking the lock, which would create the folder
    with state_lock(state, upgrade=False):
        with ProgressMeter("check") as meter:
            found = survey(state, deep=True, progress=lambda count: meter(count, 0))
        moved = set_aside(found) if repair else []
        shadow_faults = _shadow_faults(found, shadow or default_shadow(state), repair)
    left_over: list[dict[str, Any]] = [
        {
            "path": str(left.folder),
            "bytes": left.nbytes,
            "why": left.reason,
            "proved": left.proved,
            "removed": repair and remove(left),
        }
        for left in find_stale()
    ]
    gap, missing = found.gap(shadow_faults["version"]), found.missing_files()
    document = _document(found) | {
        "kind": "check",
        "gap": None if gap is None else str(gap),
        "missing_files": missing,
        "set_aside": [str(path) for path in moved],
        "shadow": shadow_faults,
        "leftovers": left_over,
    }
    if as_json:
        click.echo(json.dumps(document))
    else:
        for _, why in found.faults:
            click.echo(why)
        for target in moved:
            click.echo(f"damaged, moved to: {target}")
        if shadow_faults["note"]:
            click.echo(shadow_faults["note"])
        for item in left_over:
            done = "removed" if item["removed"] else "--repair removes it" if item["proved"] else "not removed"
            click.echo(f"left over, {item['bytes'] / 1e9:.2f} GB: {item['path']}: {item['why']} ({done})")
        sound = sum(i.fault is None for i in found.items)
        if gap is not None:
            click.echo(f"{gap}; {_REMEDIES[found.role]}")
        for name in missing:
            click.echo(f"the small file {name} of {document['version']} is missing; {_REMEDIES[f'{found.role} files']}")
        whole = "are sound" if gap is None and not missing else "match their signatures, and others are missing"
        click.echo(
            f"{state}: {sound} artifacts of run {found.run or 'unknown'} {whole}; newest version: "
            f"{document['version'] or 'none'}"
        )
    left = len(found.faults) - len(moved) + shadow_faults["left"] + (gap is not None) + len(missing)
    if left:
        sys.exit(EXIT_REFUSED)


def _shadow_faults(found: Survey, folder: Path, repair: bool) -> dict[str, Any]:
    """Return the shadow's faults: the number of corrupt cells, the number left after ``repair``, and a line for the
    user. ``version`` is None if no shadow could be opened.
    """
    out: dict[str, Any] = {"path": str(folder), "version": None, "cells": 0, "left": 0, "healed": False, "note": ""}
    if not (folder / MARKS_NAME).exists():
        return out | {"note": f"no shadow in {folder}: the daemon rebuilds the shadow when it starts"}
    good = [i for i in found.items if i.fault is None and i.assembly is not None]
    layouts = [*(i.assembly.layout for i in good if i.assembly is not None), *filter(None, [layout_in(folder)])]
    for layout in {layout.layout_id: layout for layout in layouts}.values():
        try:
            with Shadow.open(folder, layout) as shadow:
                cells = shadow.verify(cores())
                out["version"] = str(shadow.version)
                out["cells"] = out["left"] = len(cells)
                if not cells:
                    return out | {"note": f"shadow {folder}: every cell of version {shadow.version} matches its digest"}
                out["note"] = f"shadow {folder}: {len(cells)} cells of version {shadow.version} are damaged"
                if repair and (replay := replay_to(shadow.version, [_opened(i) for i in good])) is not None:
                    out["left"] = len(restore_cells(shadow, cells, replay))
                    out["healed"] = not out["left"]
                if healed := len(cells) - out["left"]:
                    out["note"] += f"; {healed} restored from artifacts on disk"
                if repair and out["left"]:
                    then = "rebuilds the shadow" if found.role == "hub" else "fetches these cells from other peers"
                    out["note"] += f"; {out['left']} not restored: the daemon {then} when it starts"
                return out
        except IntegrityError as error:
            out["note"] = f"{error} (the daemon rebuilds the shadow when it starts)"
        except LocalError as error:
            return out | {"note": str(error)}
    return out


def _opened(item: Item) -> _Whole:
    assert item.assembly is not None
    if item.base is not None:
        return _Whole(item.assembly, FileLog(item.path, len(HEADER)))
    assert item.assembly.manifest is not None
    log = AnchorLog(item.path, item.assembly.layout)
    log.add_files(item.assembly.manifest)
    return _Whole(item.assembly, log)
