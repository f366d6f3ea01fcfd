"""``p2pcast bench stripes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, handed_over
from p2pcast.limits import MAX_STRIPES, MIB


@click.command()
@click.option(
    "--rtt",
    "rtts",
    type=click.FloatRange(1, 1000),
    multiple=True,
    default=(10, 100, 300),
    show_default=True,
    help="Round trips in ms.",
)
@click.option(
    "--loss",
    "losses",
    type=click.FloatRange(0, 20),
    multiple=True,
    default=(0, 0.1, 1),
    show_default=True,
    help="Packets lost, in %.",
)
@click.option(
    "--stripes",
    type=click.IntRange(1, MAX_STRIPES),
    multiple=True,
    default=(1, 2, 4, 8, 16),
    show_default=True,
    help="TCP connections of the link.",
)
@click.option("--congestion", multiple=True, default=("cubic", "bbr"), show_default=True, help="Congestion control.")
@click.option("--rate", type=Rate(), default="50mbit", show_default=True, help="Of the way, in both directions.")
@click.option("--payload", type=click.FloatRange(0.5, 256), default=16.0, show_default=True, help="MiB of a version.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Versions over each link.")
@click.option(
    "--limit",
    type=click.FloatRange(1),
    default=2.5,
    show_default=True,
    help="A version is cut off after so many times what it takes at the full rate.",
)
@click.option(
    "--buffer", "buffers", type=click.IntRange(4096), multiple=True, help="Also with send and receive buffers of so many bytes."
)
@click.option("--backend", type=click.Choice(["auto", "native", "uml"]), default="auto", show_default=True)
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
    """What one link carries over a long and lossy way, by its number of stripes, and what a peer chooses by itself.

    Two hosts behind real netem, by this kernel or by user-mode Linux; each way is measured first, and left out where it is off by more than 5 %. Each version
    begins on an idle link, as versions do. Goodput is given as a share of what the way carries after headers.
    """
    from netem.backend import chosen
    from netem.stripes.run import Bench, bench_stripes

    numbers = tuple(sorted(set(stripes)))
    table = Table("round trip", "loss", "congestion", *map(str, numbers), "rule", "÷ best of these")
    verdicts: list[str] = []

    def tell(way: dict[str, Any]) -> None:
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
            single = "" if choice["to_single_cubic"] is None else f", {choice['to_single_cubic']:.1f} × one CUBIC stream"
            verdicts.append(
                f"{named[0]}, {named[1]}: a peer takes {choice['stripes']} × {choice['congestion']}: {choice['to_best']:.2f} of the best"
                f" ({best['stripes']} × {best['congestion']}, {best['bps'] / 1e6:.1f} Mbit/s){single}"
            )

    bench = Bench(
        chosen(backend), rate, tuple(r / 1e3 for r in dict.fromkeys(rtts)), tuple(x / 100 for x in dict.fromkeys(losses)),
        round(payload * MIB), numbers, tuple(dict.fromkeys(congestion)), (None, *dict.fromkeys(buffers)), rounds, limit,
    )  # fmt: skip
    result = bench_stripes(bench, tell)
    if handed_over(result, output, as_json=as_json):
        return
    console().print(table)
    for verdict in verdicts:
        click.echo(verdict)
