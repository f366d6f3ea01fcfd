"""``p2pcast bench latency``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from netem.emulation.backend_option import backend_option
from netem.latency import SOURCES
from p2pcast.cli.options import RateParameter, console, documented, written
from p2pcast.ground.errors import LocalError


@click.command()
@click.option("--peers", type=click.IntRange(1, 100), default=8, help="Number of peers.")
@click.option(
    "--delta",
    "deltas",
    type=click.FloatRange(1),
    multiple=True,
    default=(20, 200, 2000),
    help="Size of a version's delta in kB, approximate; repeatable.",
)
@click.option(
    "--rtt",
    "rtts",
    type=click.FloatRange(0, 1000),
    multiple=True,
    default=(1, 20, 100),
    help="Round-trip time between any two hosts in milliseconds; repeatable. 0: as short as this machine's.",
)
@click.option("--source", "sources", type=click.Choice(SOURCES), multiple=True, default=SOURCES,
              help="The trainer publishes live tensors, or renames folders into place; repeatable.")  # fmt: skip
@click.option("--state", type=click.FloatRange(0.5), default=45.0, help="Size of the whole state in MB.")
@click.option(
    "--rate", type=RateParameter(), default="100mbit", help="Rate of every link in bits per second, each way."
)
@click.option("--rounds", type=click.IntRange(1), default=9, help="Number of counted versions of each size.")
@backend_option
@documented
def latency(
    peers: int,
    deltas: tuple[float, ...],
    rtts: tuple[float, ...],
    sources: tuple[str, ...],
    state: float,
    rate: float,
    rounds: int,
    backend: str,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure the time until small versions are live at the last peer, by stage. Needs root.

    Every host is a network namespace with processes of its own. The time runs from the trainer's call of publish(), or
    from the rename of its folder, until the last peer has installed the version into a folder.
    """
    from netem.emulation.backend import chosen, results
    from netem.latency.version_latency import WORK, LatencyCase

    rows: list[dict[str, Any]] = []
    table = Table("source", "round trip", "delta", "begun", "first message", "received", "staged", "first live",
                  "last live", "beyond transfer and way")  # fmt: skip
    for rtt in dict.fromkeys(rtts):
        where = "native" if not rtt else chosen(backend)
        for source in dict.fromkeys(sources):
            sizes = tuple(round(kb * 1000) for kb in dict.fromkeys(deltas))
            case = LatencyCase(source, rtt / 1000, rate, peers, round(state * 1e6), sizes, rounds)
            for said in results(where, WORK, asdict(case)):
                if said.get("off"):
                    raise LocalError(f"the emulated network is not as asked for: {'; '.join(said['off'])}")
                if "row" in said:
                    row = {"backend": where, **said["row"]}
                    rows.append(row)
                    table.add_row(source, f"{rtt:g} ms", f"{row['bytes'] / 1e3:.1f} kB", *_cells(row))
    document = {"peers": peers, "rate_bps": rate, "state_bytes": round(state * 1e6), "rounds": rounds, "rows": rows}
    if written(document, output, as_json=as_json):
        return
    console().print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("opened_s", "receiving_s", "received_s", "staged_s", "first_live_s", "live_s", "beyond_s")
    return [f"{1e3 * row[name]:.0f} ms" for name in names]
