"""``p2pcast bench anchors``."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast import event_loop
from p2pcast.cli.options import console, documented, handed_over
from p2pcast.limits import MIB

KINDS = {
    "hub": "first cell to seal, at the hub",
    "peers": "first cell to staged at the last peer",
    "whole": "checkpoint's name to staged at the last peer",
}


@click.command()
@click.option("--versions", type=click.IntRange(8), default=80, show_default=True, help="That are timed.")
@click.option(
    "--every", type=click.IntRange(2), default=4, show_default=True, help="Versions between anchors; a hub writes one every 50."
)
@click.option("--state", "state_mib", type=click.IntRange(1), default=256, show_default=True, help="MiB of weights.")
@click.option("--peers", type=click.IntRange(1), default=2, show_default=True, help="In one chain.")
@click.option(
    "--on",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder on the disk to write anchors to.  [default: the temporary folder]",
)
@click.option("--deadline", type=click.FloatRange(1), default=60.0, show_default=True, help="Seconds for a version.")
@documented
def anchors(
    versions: int, every: int, state_mib: int, peers: int, on: Path | None, deadline: float, as_json: bool, output: Path | None
) -> None:
    """What versions take while the hub writes an anchor, beside those of the same run while it does not.

    A hub and peers as processes on this machine, each side with half of its cores; no privileges. Each version moves 1 % of the weights and goes out as soon as the one before is staged everywhere.
    """
    from netem.anchors import beside_anchors

    with (
        tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder,
        tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir=on) as hub,
    ):
        found = event_loop.run(beside_anchors(Path(folder), Path(hub), state_mib * MIB, peers, versions, every, deadline))
    rows = []
    for kind in KINDS:
        beside = [getattr(t, kind) for t in found.times if t.beside]
        alone = [getattr(t, kind) for t in found.times if not t.beside]
        rows.append(_row(kind, beside, alone))
    document: dict[str, Any] = {
        "state_bytes": found.state_bytes, "peers": peers, "every": every, "anchors": len(found.anchors_s),
        "anchor_s": _median(found.anchors_s), "beside": sum(t.beside for t in found.times),
        "alone": sum(not t.beside for t in found.times), "left_out": found.left_out, "rows": rows,
    }  # fmt: skip
    if handed_over(document, output, as_json=as_json):
        return
    table = Table("seconds", "while an anchor is written", "p90", "while none is", "p90", "ratio")
    for row in rows:
        numbers = [row[key] for key in ("beside_s", "beside_p90_s", "alone_s", "alone_p90_s")]
        table.add_row(
            KINDS[row["what"]],
            *("–" if x is None else f"{x:.3f}" for x in numbers),
            "–" if row["ratio"] is None else f"{row['ratio']:.2f}",
        )
    console().print(table)
    click.echo(
        f"{document['beside']} versions beside {document['anchors']} anchors of {found.state_bytes:,} bytes, {document['anchor_s'] or 0:.2f} s each, and "
        f"{document['alone']} beside none; {found.left_out} for a smaller part of their time, left out. Medians; {peers} peers"
    )


def _row(what: str, beside: list[float], alone: list[float]) -> dict[str, Any]:
    one, other = _median(beside), _median(alone)
    return {
        "what": what, "beside_s": one, "beside_p90_s": _p90(beside), "alone_s": other, "alone_p90_s": _p90(alone),
        "ratio": None if one is None or not other else round(one / other, 4),
    }  # fmt: skip


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _p90(values: list[float]) -> float | None:
    return round(statistics.quantiles(values, n=10, method="inclusive")[-1], 4) if len(values) > 1 else None
