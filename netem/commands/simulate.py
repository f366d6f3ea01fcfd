"""``p2pcast simulate``: the hub's own planning code on a simulated fleet."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import PATH, RateParameter, console, documented, written
from p2pcast.ground.errors import LocalError
from p2pcast.page.recorded_run import SIMULATED

MBIT = 1e6
MIB = 1 << 20
SETTLING = 2
"""First versions, left out of the summary: the hub has not measured any peer's rate yet."""


@click.command("simulate")
@click.option("--peers", type=click.IntRange(1), default=1000, help="Number of peers.")
@click.option("--regions", type=click.IntRange(1), default=5, help="Number of regions of equal size.")
@click.option("--versions", type=click.IntRange(SETTLING + 1), default=20, help="Number of versions.")
@click.option("--interval", type=click.FloatRange(min=1), default=15.0, help="Seconds between two versions.")
@click.option("--payload", type=click.FloatRange(min=0, min_open=True), default=64.0, help="Size of a version in MiB.")
@click.option("--uplink", type=RateParameter(), default="3gbit", help="Upload rate of the hub in bits per second.")
@click.option(
    "--peer-rate",
    type=RateParameter(),
    default="100mbit",
    help="Rate of each peer in bits per second, upload and download each.",
)
@click.option(
    "--churn",
    type=click.FloatRange(0, 100),
    default=1.0,
    help="Peers that die in a minute, in per cent; as many join.",
)
@click.option(
    "--silent",
    type=click.FloatRange(0, 1),
    default=0.5,
    help="Share of deaths, 0 to 1, after which no kernel closes the connections.",
)
@click.option(
    "--slow",
    type=click.FloatRange(0, 100),
    default=0.25,
    help="Peers that slow down in a minute, in per cent; each for about a minute.",
)
@click.option(
    "--hop",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Time in milliseconds that a peer takes to forward a piece.",
)
@click.option("--seed", type=int, default=0, help="Seed of the random numbers.")
@click.option("--events", type=PATH, help="File for the run's events, for p2pcast replay.")
@documented
def simulate(
    peers: int,
    regions: int,
    versions: int,
    interval: float,
    payload: float,
    uplink: float,
    peer_rate: float,
    churn: float,
    silent: float,
    slow: float,
    hop: float,
    seed: int,
    events: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Simulate broadcasts to a fleet: for each version, the time to 99 % of the peers and to the last peer, divided by
    the ideal time. The ideal is the payload at a peer's own rate.

    The hub's own code handles joins, deaths, moves and plans; links, delays and churn are modelled. The same seed gives
    the same run.

    \b
    Examples:
      p2pcast simulate --peers 5000 --regions 8 --churn 2
      p2pcast simulate --payload 200 --uplink 10gbit --json
      p2pcast simulate --peers 200 --events run.events && p2pcast replay run.events --speed 5
    """
    from netem.simulation.fleet_simulator import FleetEvents
    from netem.simulation.fleet_simulator import simulate as run
    from p2pcast.artifact.piece_size import piece_bytes
    from p2pcast.transport.stripe_count import FEWEST
    from topology.broadcast_time import BroadcastNetwork

    # As the hub assumes it: a hop carries a piece on each stripe in use.
    hops = math.ceil(peers / max(1, int(uplink / peer_rate)))
    piece = FEWEST * piece_bytes(round(payload * MIB), hops, peer_rate)
    scenario = FleetEvents(
        peers=peers,
        regions=regions,
        versions=versions,
        payload_bytes=payload * MIB,
        uplink_bps=uplink,
        peer_bps=peer_rate,
        interval_s=interval,
        deaths=churn / 100,
        silent=silent,
        slowdowns=slow / 100,
        network=BroadcastNetwork(piece, root_region="region-0", hop_s=hop / 1e3),
    )
    with contextlib.ExitStack() as opened:
        tell = None if events is None else opened.enter_context(_writer(events, peers, seed))
        rows = [result.document for result in run(scenario, seed, tell)]
    document: dict[str, Any] = {
        "peers": peers,
        "regions": regions,
        "payload_bytes": scenario.payload_bytes,
        "uplink_bps": uplink,
        "peer_bps": peer_rate,
        "interval_s": interval,
        "deaths_per_minute": churn / 100,
        "silent": silent,
        "slowdowns_per_minute": slow / 100,
        "hop_s": hop / 1e3,
        "piece_bytes": piece // FEWEST,
        "seed": seed,
        "t99_over_ideal": _spread([row["t99_over_ideal"] for row in rows[SETTLING:]]),
        "last_over_ideal": _spread([row["last_over_ideal"] for row in rows[SETTLING:]]),
        "rows": rows,
    }
    if not written(document, output, as_json=as_json):
        _print(document)


def _spread(values: list[float | None]) -> dict[str, float | None]:
    """Median, 90th percentile and worst of ``values``. None stands for an unfinished broadcast, which ranks last."""
    ranked = sorted(math.inf if v is None else v for v in values)
    found = {"median": median(ranked), "p90": ranked[math.ceil(0.9 * len(ranked)) - 1], "worst": ranked[-1]}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _print(document: dict[str, Any]) -> None:
    table = Table(
        title=f"{document['peers']} peers of {document['peer_bps'] / MBIT:g} Mbit/s in {document['regions']} regions"
    )
    for title in (
        "version",
        "99 %, s",
        "÷ ideal",
        "last, s",
        "÷ ideal",
        "unfinished",
        "deaths",
        "joins",
        "slowed",
        "moves",
    ):
        table.add_column(title, justify="right")
    for number, row in enumerate(document["rows"], 1):
        times = (row["t99_s"], row["t99_over_ideal"], row["last_s"], row["last_over_ideal"])
        counts = (row[key] for key in ("unfinished", "deaths", "joins", "slowdowns", "moved"))
        table.add_row(str(number), *("–" if v is None else f"{v:.2f}" for v in times), *map(str, counts))
    console().print(table)
    for name, key in (("99 %", "t99_over_ideal"), ("the last", "last_over_ideal")):
        shown = ", ".join(f"{what} {'–' if v is None else f'{v:.2f}'}" for what, v in document[key].items())
        click.echo(f"time to {name} ÷ ideal, from version {SETTLING + 1} on: {shown}")


@contextlib.contextmanager
def _writer(file: Path, peers: int, seed: int) -> Iterator[Callable[[float, str, dict[str, Any]], object]]:
    """Writes events as lines of JSON, at times after the present. Raises LocalError."""
    began_s = time.time()
    try:
        with file.open("w", encoding="utf-8") as lines:

            def tell(time_s: float, kind: str, facts: dict[str, Any]) -> None:
                lines.write(json.dumps({"kind": kind, "time": round(began_s + time_s, 3), "facts": facts}) + "\n")

            tell(0.0, SIMULATED, {"peers": peers, "seed": seed})
            yield tell
    except OSError as error:
        raise LocalError(f"{file} cannot be written: {error.strerror}") from None
