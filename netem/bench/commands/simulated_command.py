"""``p2pcast bench simulated``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.cli.options import Rate, console, documented, written
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop

if TYPE_CHECKING:
    from netem.bench.model_agreement import Costs, Measured

CHAINS = 2
WIDE_BPS = 1e12
"""Rate of the hub's uplink, in bits per second: no limit, because each of the hub's links has its own rate."""


@click.command()
@click.option("--peers", type=click.IntRange(4, 32), default=6, help="Number of peers, in two chains.")
@click.option("--payload", type=click.IntRange(1), default=6, help="Size of a version in MiB.")
@click.option(
    "--rate", type=Rate(), default="16mbit", help="Rate of the path between two processes, in bits per second."
)
@click.option("--only", multiple=True, metavar="WORDS", help="First words of the scenarios to run; repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=1, help="Number of broadcasts of each scenario.")
@click.option("--deadline", type=click.FloatRange(1), default=60.0, help="Time limit for a broadcast in seconds.")
@documented
def simulated(
    peers: int,
    payload: int,
    rate: float,
    only: tuple[str, ...],
    rounds: int,
    deadline: float,
    as_json: bool,
    output: Path | None,
) -> None:
    """Compare the simulator with reality: the time to the last peer in broadcasts of real processes, in the same
    broadcasts simulated, and the ratio.

    The first broadcast calibrates the simulator (share of headers, time of a hop) and is not compared. The processes
    run on this machine behind proxies; no privileges needed.
    """
    from netem.bench.model_agreement import SCENARIOS

    scenarios = [name for name in SCENARIOS if not only or any(f"{name} ".startswith(f"{words} ") for words in only)]
    if not scenarios:
        raise click.BadParameter("no scenario begins with these words", param_hint="--only")
    document = event_loop.run(_compare(peers, payload * MIB, rate / 8, scenarios * rounds, deadline))
    if written(document, output, as_json=as_json):
        return
    table = Table("scenario", "chains", "measured, s", "simulated, s", "ratio")
    for row in document["rows"]:
        chains = " · ".join(str(len(chain)) for chain in row["chains"])
        table.add_row(
            row["scenario"], chains, f"{row['measured_s']:.2f}", f"{row['simulated_s']:.2f}", f"{row['ratio']:.3f}"
        )
    console().print(table)
    click.echo(
        f"calibration from a separate broadcast: payload gets {document['share']:.3f} of a path's rate, "
        f"a hop adds {document['hop_s'] * 1e3:.0f} ms to a piece's time"
    )


async def _compare(
    peers: int, payload_bytes: int, rate_bytes_s: float, scenarios: list[str], deadline_s: float
) -> dict[str, Any]:
    from netem.bench.model_agreement import learn, measure
    from netem.emulation.loopback import Net
    from netem.fleet.local_fleet import Fleet

    rows = []
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        async with Fleet(Path(folder), Net(rate_bytes_s), peers, CHAINS, payload_bytes, deadline_s) as fleet:
            await measure(fleet, "undisturbed")  # warm-up: compiles kernels, opens congestion windows
            first = await measure(fleet, "undisturbed")
            costs = learn(first.chains[0], first.times_s, first.payload_bytes, rate_bytes_s)
            for scenario in scenarios:
                found = await measure(fleet, scenario)
                expected_s = simulated_s(found, scenario, costs, 8 * rate_bytes_s)
                rows.append(
                    {
                        "scenario": scenario,
                        "chains": found.chains,
                        "struck_s": round(found.struck_s, 3),
                        "measured_s": round(found.last_s, 4),
                        "simulated_s": round(expected_s, 4),
                        "ratio": round(expected_s / found.last_s, 4),
                    }
                )
    return {
        "payload_bytes": payload_bytes, "rate_bits_s": 8 * rate_bytes_s, "share": round(costs.share, 4),
        "hop_s": round(costs.hop_s, 4), "rows": rows,
    }  # fmt: skip


def simulated_s(found: Measured, scenario: str, costs: Costs, rate_bps: float) -> float:
    """Seconds until the last peer, the victim excluded, has the same broadcast in the simulator."""
    from netem.bench.model_agreement import SLOW_SHARE
    from netem.fleet.local_fleet import HUB
    from netem.simulation.broadcast_replay import Fault, replay
    from netem.simulation.fleet_simulator import Scenario
    from topology.broadcast_time import Network
    from topology.plan_tree import ROOT

    bps = costs.share * rate_bps
    network = Network(
        piece_bytes=piece_bytes(found.payload_bytes), near_rtt_s=0.0, root_region="region-0", hop_s=costs.hop_s
    )
    model = Scenario(regions=1, payload_bytes=found.payload_bytes, uplink_bps=WIDE_BPS, peer_bps=bps, network=network)
    blows = []
    if found.victim is not None:
        blows = [Fault(found.struck_s, found.victim, None if scenario.startswith("kill") else SLOW_SHARE * bps)]
    parent = {peer: ROOT if above == HUB else above for peer, above in found.parent.items()}
    times_s = replay(model, parent, blows, CHAINS)
    return max(s for peer, s in times_s.items() if peer != found.victim)
