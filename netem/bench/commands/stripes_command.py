"""``p2pcast bench stripes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from netem.emulation.backend_option import backend_option
from p2pcast.cli.options import RateParameter, console, documented, written
from p2pcast.ground.limits import MAX_STRIPES, MIB


@click.command()
@click.option(
    "--rtt",
    "rtts",
    type=click.FloatRange(1, 1000),
    multiple=True,
    default=(10, 100, 300),
    help="Round-trip time in milliseconds; repeatable.",
)
@click.option(
    "--loss",
    "losses",
    type=click.FloatRange(0, 20),
    multiple=True,
    default=(0, 0.1, 1),
    help="Packet loss in per cent; repeatable.",
)
@click.option(
    "--stripes",
    type=click.IntRange(1, MAX_STRIPES),
    multiple=True,
    default=(1, 2, 4, 8, 16),
    help="Number of TCP connections of the link; repeatable.",
)
@click.option("--congestion", multiple=True, default=("cubic", "bbr"), help="TCP congestion control; repeatable.")
@click.option(
    "--rate", type=RateParameter(), default="50mbit", help="Rate of the path in bits per second, in both directions."
)
@click.option("--payload", type=click.FloatRange(0.5, 256), default=16.0, help="Size of a version in MiB.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Number of versions over each link.")
@click.option(
    "--limit",
    type=click.FloatRange(1),
    default=2.5,
    help="Time limit for a version, as a multiple of its time at the full rate.",
)
@click.option(
    "--buffer",
    "buffers",
    type=click.IntRange(4096),
    multiple=True,
    help="Size of send and receive buffers in bytes, for an additional row; repeatable.",
)
@backend_option
@documented
def stripes(
    rtts: tuple[float, ...],
    losses: tuple[float, ...],
    stripes: tuple[int, ...],
    congestion: tuple[str, ...],
    rate: float,
    payload: float,
    rounds: int,
    limit: float,
    buffers: tuple[int, ...],
    backend: str,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure the goodput of one link over a long and lossy path, by number of stripes, and with the number that a peer
    chooses.

    Two hosts behind real netem, in this kernel or in user-mode Linux. Each path is measured first; a path that is off
    by more than 5 % is left out. Each version begins on an idle link, as in a run. Goodput is a share of the path's
    capacity after headers.
    """
    from netem.emulation.backend import chosen
    from netem.stripes.stripes_comparison import StripesBench, bench_stripes

    numbers = tuple(sorted(set(stripes)))
    table = Table("round trip", "loss", "congestion", *map(str, numbers), "chosen", "÷ best of these")
    verdicts: list[str] = []

    def show_row(way: dict[str, Any]) -> None:
        named = f"{way['rtt_s'] * 1e3:g} ms", f"{way['loss']:.1%}"
        if "by_congestion" not in way:
            verdicts.append(f"{named[0]}, {named[1]}: left out, {'; '.join(way['off'])}")
            return
        for name, row in way["by_congestion"].items():
            shares = [f"{row['of_ceiling'][str(n)]:.2f}" if str(n) in row["of_ceiling"] else "" for n in numbers]
            rule = "" if row["rule_to_best"] is None else f"{row['rule_to_best']:.2f}"
            table.add_row(*named, name, *shares, str(row["rule"]), rule)
        choice, best = way["choice"], way["best"]
        if choice["to_best"] is not None:
            single = (
                "" if choice["to_single_cubic"] is None else f", {choice['to_single_cubic']:.1f} × one CUBIC stream"
            )
            verdicts.append(
                f"{named[0]}, {named[1]}: a peer chooses {choice['stripes']} × {choice['congestion']}: "
                f"{choice['to_best']:.2f} of the best ({best['stripes']} × {best['congestion']}, "
                f"{best['bps'] / 1e6:.1f} Mbit/s){single}"
            )

    bench = StripesBench(
        chosen(backend),
        rate,
        tuple(r / 1e3 for r in dict.fromkeys(rtts)),
        tuple(x / 100 for x in dict.fromkeys(losses)),
        round(payload * MIB),
        numbers,
        tuple(dict.fromkeys(congestion)),
        (None, *dict.fromkeys(buffers)),
        rounds,
        limit,
    )
    result = bench_stripes(bench, show_row)
    if written(result, output, as_json=as_json):
        return
    console().print(table)
    for verdict in verdicts:
        click.echo(verdict)
