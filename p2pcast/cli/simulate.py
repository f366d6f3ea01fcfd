"""``p2pcast simulate``: the hub's decisions about a fleet that is not there."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, handed_over

MBIT = 1e6
MIB = 1 << 20
SETTLING = 2
"""Versions at the beginning that the summary leaves out: nothing has been measured yet."""


@click.command("simulate")
@click.option("--peers", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--regions", type=click.IntRange(1), default=5, show_default=True)
@click.option("--versions", type=click.IntRange(SETTLING + 1), default=20, show_default=True)
@click.option("--interval", type=click.FloatRange(min=1), default=15.0, show_default=True, help="Seconds between two versions.")
@click.option(
    "--payload", type=click.FloatRange(min=0, min_open=True), default=64.0, show_default=True, help="Of a version, in MiB."
)
@click.option("--uplink", type=Rate(), default="3gbit", show_default=True, help="The hub's.")
@click.option("--peer-rate", type=Rate(), default="100mbit", show_default=True, help="Each peer's, in and out.")
@click.option(
    "--churn",
    type=click.FloatRange(0, 100),
    default=1.0,
    show_default=True,
    help="Per cent of the peers that die a minute; as many join.",
)
@click.option(
    "--silent", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Share of deaths that no kernel tells of."
)
@click.option(
    "--slow",
    type=click.FloatRange(0, 100),
    default=0.25,
    show_default=True,
    help="Per cent that slow down a minute, for a minute or so.",
)
@click.option(
    "--hop",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Milliseconds that a peer takes to pass a piece on.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@documented
def simulate(
    peers: int, regions: int, versions: int, interval: float, payload: float, uplink: float, peer_rate: float, churn: float,
    silent: float, slow: float, hop: float, seed: int, as_json: bool, output: Path | None,
) -> None:  # fmt: skip
    """Time to 99 % of a fleet, and to its last peer, version by version, over the ideal: the payload at a peer's own rate.

    The hub's own code decides about joins, deaths, moves and plans; links, delays and churn are modelled. The same seed gives the same run.
    """
    from topology.model import Network
    from trainer_node.simulator import Scenario
    from trainer_node.simulator import simulate as run

    scenario = Scenario(
        peers=peers, regions=regions, versions=versions, payload_bytes=payload * MIB, uplink_bps=uplink, peer_bps=peer_rate,
        interval_s=interval, deaths=churn / 100, silent=silent, slowdowns=slow / 100,
        network=Network(root_region="region-0", hop_s=hop / 1e3),
    )  # fmt: skip
    rows = [result.document for result in run(scenario, seed)]
    document: dict[str, Any] = {
        "peers": peers, "regions": regions, "payload_bytes": scenario.payload_bytes, "uplink_bps": uplink, "peer_bps": peer_rate,
        "interval_s": interval, "deaths_per_minute": churn / 100, "silent": silent, "slowdowns_per_minute": slow / 100, "hop_s": hop / 1e3, "seed": seed,
        "t99_over_ideal": _spread([row["t99_over_ideal"] for row in rows[SETTLING:]]),
        "last_over_ideal": _spread([row["last_over_ideal"] for row in rows[SETTLING:]]),
        "rows": rows,
    }  # fmt: skip
    if not handed_over(document, output, as_json=as_json):
        _print(document)


def _spread(values: list[float | None]) -> dict[str, float | None]:
    """None stands for one that did not come to its end: later than all others."""
    ranked = sorted(math.inf if v is None else v for v in values)
    found = {"median": median(ranked), "p90": ranked[math.ceil(0.9 * len(ranked)) - 1], "worst": ranked[-1]}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _print(document: dict[str, Any]) -> None:
    table = Table(title=f"{document['peers']} peers of {document['peer_bps'] / MBIT:g} Mbit/s in {document['regions']} regions")
    for title in ("version", "99 %, s", "÷ ideal", "last, s", "÷ ideal", "unfinished", "deaths", "joins", "slowed", "moves"):
        table.add_column(title, justify="right")
    for number, row in enumerate(document["rows"], 1):
        times = (row["t99_s"], row["t99_over_ideal"], row["last_s"], row["last_over_ideal"])
        counts = (row[key] for key in ("unfinished", "deaths", "joins", "slowdowns", "moved"))
        table.add_row(str(number), *("–" if v is None else f"{v:.2f}" for v in times), *map(str, counts))
    console().print(table)
    for name, key in (("99 %", "t99_over_ideal"), ("the last", "last_over_ideal")):
        shown = ", ".join(f"{what} {'–' if v is None else f'{v:.2f}'}" for what, v in document[key].items())
        click.echo(f"time to {name} ÷ ideal, from version {SETTLING + 1} on: {shown}")
