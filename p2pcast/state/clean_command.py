"""``p2pcast clean``: list and remove the shadows that daemons of this user have left in memory.

Modules with codecs are imported inside functions, so that shells can complete the command's options quickly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pcast.process.repeated_messages import span

if TYPE_CHECKING:
    from p2pcast.state.stale_shadows import FoundShadow


@click.command()
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    default=0.0,
    metavar="DAYS",
    help="Days for which a removed shadow has been unused.",
)
@click.option("--dry-run", is_flag=True, help="List of the shadows alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def clean(older_than: float, dry_run: bool, as_json: bool) -> None:
    """Remove the shadows in /dev/shm that daemons of this user have left on this machine.

    A shadow stays in memory after its daemon's end, for a quick start. Without the shadow, the next start makes the
    same state from disk or network. Shadows stay if a daemon uses them, or names their state folder while it waits for
    a version. Shadows of other users are not touched. A folder of version 0.1, which names no state folder, is listed.
    """
    from p2pcast.state.stale_shadows import DAY_S, find_all, remove_halves, remove_unused

    if not dry_run:
        remove_halves()
    rows = [_shadow_row(found) for found in find_all()]
    for row in rows:
        old = older_than == 0 or (row["unused_s"] or 0.0) >= older_than * DAY_S
        row["due"] = not row["in_use"] and row["state"] is not None and old
        row["removed"] = row["due"] and not dry_run and remove_unused(Path(row["path"]), older_than * DAY_S)
    if as_json:
        click.echo(json.dumps({"kind": "clean", "shadows": rows}))
        return
    done, verb = ("due", "would be ") if dry_run else ("removed", "")
    for row in rows:
        click.echo((f"{verb}removed: " if row[done] else "") + _shadow_line(row))
    freed = sum(row["bytes"] for row in rows if row[done])
    click.echo(f"{freed / 1e9:.2f} GB {verb}freed" if rows else "no shadows of this user in /dev/shm")


def shadow_lines() -> list[str]:
    """Return one line per shadow of this user on this machine."""
    from p2pcast.state.stale_shadows import find_all

    return [_shadow_line(_shadow_row(found)) for found in find_all()]


def _shadow_row(found: FoundShadow) -> dict[str, Any]:
    return {
        "path": str(found.folder),
        "bytes": found.nbytes,
        "state": None if found.state is None else str(found.state),
        "state_exists": found.state_exists,
        "in_use": found.in_use,
        "unused_s": found.unused_s,
    }


def _shadow_line(row: dict[str, Any]) -> str:
    if row["in_use"]:
        use = "in use"
    elif row["unused_s"] is None:
        use = "unused, its daemon was killed"
    else:
        use = f"unused for {span(row['unused_s'])}"
    gone = {True: "", False: ", which is gone", None: ", of another container"}[row["state_exists"]]
    home = "no known state folder" if row["state"] is None else f"state folder {row['state']}{gone}"
    return f"shadow {row['path']}: {row['bytes'] / 1e9:.2f} GB, {use}, {home}"
