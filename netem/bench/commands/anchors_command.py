"""``p2pcast bench anchors``."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop

KINDS = {
    "hub": "first cell to seal, at the hub",
    "peers": "first cell to staged at the last peer",
    "whole": "checkpoint's name to staged at the last peer",
}


@click.command()
@click.option("--versions", type=click.IntRange(8), default=80, help="Number of timed versions.")
@click.option(
    "--every",
    type=click.IntRange(2),
    default=4,
    help="Number of versions between two anchors; the default of a hub is 50.",
)
@click.option("--state", "state_mib", type=click.IntRange(1), default=256, help="Size of the weights in MiB.")
@click.option("--peers", type=click.IntRange(1), default=2, help="Number of peers, in one chain.")
@click.option(
    "--on",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Folder for anchors, on the disk to measure.  [default: the temporary folder]",
)
@click.option("--deadline", type=click.FloatRange(1), default=60.0, help="Time limit for a version in seconds.")
@documented
def anchors(
    versions: int,
    every: int,
    state_mib: int,
    peers: int,
    on: Path | None,
    deadline: float,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure the time of versions while the hub writes an anchor, beside versions of the same run without an anchor.

    A hub and peers run as processes on this machine, each side with half of the cores; no privileges needed. Each
    version changes 1 % of the weights. It goes out as soon as the version before is staged at all peers.
    """
    from netem.bench.anchor_cost import beside_anchors

    with (
        tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder,
        tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir=on) as hub,
    ):
        found = event_loop.run(
            beside_anchors(Path(folder), Path(hub), state_mib * MIB, peers, versions, every, deadline)
        )
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
    if written(document, output, as_json=as_json):
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
        f"{document['beside']} versions beside {document['anchors']} anchors of {found.state_bytes:,} bytes, "
        f"{document['anchor_s'] or 0:.2f} s each, and {document['alone']} versions beside none; "
        f"{found.left_out} versions overlap an anchor in part and are left out. Medians; {peers} peers"
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
