"""``p2pcast inspect STATE`` and ``p2pcast check STATE``: what lies in the state folder of a hub or a peer, and whether it is sound."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.p2pd import HEADER
from p2pcast.cli.options import PATH, console
from p2pcast.daemon import default_shadow
from p2pcast.errors import EXIT_REFUSED, IntegrityError, LocalError
from p2pcast.parallel import cores
from p2pcast.progress import Meter
from p2pcast.state.leftovers import leftovers, remove
from p2pcast.state.replay import heal, replay_to
from p2pcast.state.shadow import MARKS_NAME, Shadow, layout_in
from p2pcast.store.anchor_log import AnchorLog
from p2pcast.store.files import explained
from p2pcast.store.log import FileLog, Log
from p2pcast.store.state_format import check as check_format
from p2pcast.store.state_format import state_lock
from p2pcast.store.survey import Item, Survey, set_aside, survey


def describe_state(path: Path) -> dict[str, Any]:
    """A state folder as a JSON document, by its records; a daemon may be running on it. Raises LocalError."""
    check_format(path)
    return _document(survey(path)) | {"kind": "state"}


def _document(found: Survey) -> dict[str, Any]:
    known = ("node", "incarnation", "target", "newest")
    return {
        "path": str(found.root),
        "role": found.role,
        "run": found.run,
        "version": None if found.newest is None else str(found.newest),
        **{key: found.facts[key] for key in known if key in found.facts and key != "newest"},
        "artifacts": [
            {
                "version": str(i.version), "base": None if i.base is None else str(i.base), "kind": i.kind, "bytes": i.log_bytes,
                "state": f"{i.state:016x}", "path": str(i.path),
            }
            for i in sorted(found.items, key=lambda i: (i.version or (0, 0), i.base is None))
            if i.fault is None
        ],
        "partial": [{"path": str(path), "version": None if version is None else str(version)} for path, version in found.partial],
        "sizes": found.sizes,
        "faults": [{"path": str(path), "reason": why} for path, why in found.faults],
    }  # fmt: skip


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
        out.print(f"and {len(document['artifacts']) - len(shown)} older ones (--all)")
    for half in document["partial"]:
        out.print(escape(f"half received: version {half['version'] or 'unknown'}, {half['path']}"))
    for fault in document["faults"]:
        out.print(escape(fault["reason"]))


@dataclass(frozen=True, slots=True)
class _Whole:
    assembly: Assembly
    log: Log


@click.command()
@click.argument("state", type=PATH)
@click.option("--repair", is_flag=True, help="Set aside what is damaged, and put right what of the shadow can be.")
@click.option("--shadow", type=PATH, help="Where its shadow is.  [default: as for the daemon]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def check(state: Path, repair: bool, shadow: Path | None, as_json: bool) -> None:
    """Read every byte of the state folder of a hub or peer that is not running, and of its shadow, and compare it with what was signed.

    Exit code 3 names what is damaged. With --repair it is moved to STATE/damaged, from where nothing is taken, cells of the shadow that have rotted are
    put right from what lies on disk, and a peer's daemon fetches the rest, those cells alone, when it starts.

    Lists this user's shadows in /dev/shm whose state folder is gone, too; --repair removes them.
    """
    with explained("read", state):
        state.stat()
    check_format(state)
    survey(state)  # before its lock makes a folder of it
    with state_lock(state, upgrade=False):
        with Meter("check") as meter:
            found = survey(state, deep=True, seen=lambda count: meter(count, 0))
        moved = set_aside(found) if repair else []
        rotten = _shadow_faults(found, shadow or default_shadow(state), repair)
    left_over: list[dict[str, Any]] = [
        {
            "path": str(left.folder),
            "bytes": left.nbytes,
            "why": left.why,
            "proved": left.proved,
            "removed": repair and remove(left),
        }
        for left in leftovers()
    ]
    document = _document(found) | {
        "kind": "check",
        "set_aside": [str(path) for path in moved],
        "shadow": rotten,
        "leftovers": left_over,
    }
    if as_json:
        click.echo(json.dumps(document))
    else:
        for _, why in found.faults:
            click.echo(why)
        for target in moved:
            click.echo(f"set aside: {target}")
        if rotten["note"]:
            click.echo(rotten["note"])
        for item in left_over:
            done = "removed" if item["removed"] else "--repair removes it" if item["proved"] else "not removed"
            click.echo(f"left over, {item['bytes'] / 1e9:.2f} GB: {item['path']}: {item['why']} ({done})")
        sound = sum(i.fault is None for i in found.items)
        click.echo(
            f"{state}: {sound} artifacts of run {found.run or 'unknown'} are sound, the newest is {document['version'] or 'none'}"
        )
    left = len(found.faults) - len(moved) + rotten["left"]
    if left:
        sys.exit(EXIT_REFUSED)


def _shadow_faults(found: Survey, folder: Path, repair: bool) -> dict[str, Any]:
    """What is wrong with the shadow: cells that rotted, how many are left when those are put right that can be, and a line about it."""
    out: dict[str, Any] = {"path": str(folder), "cells": 0, "left": 0, "healed": False, "note": ""}
    if not (folder / MARKS_NAME).exists():
        return out | {"note": f"no shadow in {folder}: it is made anew when the daemon starts"}
    good = [i for i in found.items if i.fault is None and i.assembly is not None]
    layouts = [*(i.assembly.layout for i in good if i.assembly is not None), *filter(None, [layout_in(folder)])]
    for layout in {layout.layout_id: layout for layout in layouts}.values():
        try:
            with Shadow.open(folder, layout) as shadow:
                cells = shadow.verify(cores())
                out["cells"] = out["left"] = len(cells)
                if not cells:
                    return out | {"note": f"shadow {folder}: every cell of version {shadow.version} matches its digest"}
                out["note"] = f"shadow {folder}: {len(cells)} cells of version {shadow.version} have rotted"
                if repair and (replay := replay_to(shadow.version, [_opened(i) for i in good])) is not None:
                    out["left"] = len(heal(shadow, cells, replay))
                    out["healed"] = not out["left"]
                if healed := len(cells) - out["left"]:
                    out["note"] += f"; {healed} were put right from what lies on disk"
                if repair and out["left"]:
                    then = "makes the shadow anew" if found.role == "hub" else "fetches those cells of others"
                    out["note"] += f"; {out['left']} could not be: the daemon {then} when it starts"
                return out
        except IntegrityError as error:
            out["note"] = f"{error} (the daemon does that when it starts)"
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
