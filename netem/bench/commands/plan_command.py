"""``p2pcast bench plan``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, written

REPEATS = 5
SMALL_REGION = 5
"""Peers in each region, in the measurement with many regions."""
MIXED_BPS = (25e6, 50e6, 100e6, 200e6)


@click.command("plan")
@click.option("--peers", type=click.IntRange(2), default=10_000, help="Number of peers.")
@click.option("--regions", type=click.IntRange(1), default=5, help="Number of regions.")
@click.option(
    "--uplink",
    type=Rate(),
    default="30gbit",
    help="Upload rate of the hub in bits per second; each peer has 100 Mbit/s.",
)
@documented
def plan(peers: int, regions: int, uplink: float, as_json: bool, output: Path | None) -> None:
    """Measure the time of the hub's planning decisions for a large fleet. The decisions are a first plan, a new plan, a
    join, a death, and the joins of a whole fleet. Also plans with five peers to a region, of mixed rates.
    """
    rows = measure(peers, regions, uplink)
    document: dict[str, Any] = {"peers": peers, "regions": regions, "uplink_bps": uplink, "rows": rows}
    if written(document, output, as_json=as_json):
        return
    table = Table("what", "ms, best", "ms, median")
    for row in rows:
        table.add_row(row["what"], f"{row['best_s'] * 1e3:.2f}", f"{row['median_s'] * 1e3:.2f}")
    console().print(table)


def measure(peers: int, regions: int, uplink_bps: float) -> list[dict[str, Any]]:
    from topology import Member, admit, excise, make_plan
    from topology.broadcast_time import number_of_chains
    from topology.fallback_neighbours import affected_peers, fallback_parents
    from trainer_node.membership.membership import Membership
    from trainer_node.membership.peer_record import PeerRecord
    from trainer_node.membership.plan_distributor import BACKUPS

    members = [Member(f"{i * 2654435761 % 2**64:016x}", f"r{i % regions}", 100e6, 50.0 + i % 50) for i in range(peers)]
    first = make_plan(members, uplink_bps, epoch=(1, 1))
    chains = number_of_chains(uplink_bps, [100e6], peers)
    newcomer, dying = Member("newcomer", "r0"), members[peers // 2].id

    rates = random.Random(0).choices(MIXED_BPS, k=2 * peers)
    many = f"{-(-peers // SMALL_REGION)} regions, mixed rates"
    mixed, changed = (
        [
            replace(m, region=f"r{i // SMALL_REGION}", bps=bps)
            for i, (m, bps) in enumerate(zip(members, some, strict=True))
        ]
        for some in (rates[:peers], rates[peers:])
    )
    entered = make_plan(mixed, uplink_bps, epoch=(1, 1))

    def join_all() -> None:
        fleet = Membership(1, uplink_bps)
        for m in members:
            fleet.join(PeerRecord(m.id, m.id, m.region, "", 0, 0.0), 0.0)

    after = excise(first, [dying], epoch=(1, 2))

    def find_affected() -> None:
        for peer in affected_peers(first, after, {dying, *first.children(dying)}):
            after.backups(peer, BACKUPS)
            fallback_parents(after, peer)

    return [
        _timed("plan from nothing", lambda: make_plan(members, uplink_bps, epoch=(1, 1))),
        _timed("plan anew", lambda: make_plan(members, uplink_bps, epoch=(1, 2), previous=first)),
        _timed(f"plan from nothing, {many}", lambda: make_plan(mixed, uplink_bps, epoch=(1, 1))),
        _timed(f"plan anew, {many}", lambda: make_plan(mixed, uplink_bps, epoch=(1, 2), previous=entered)),
        _timed(
            f"plan anew, {many} that all changed",
            lambda: make_plan(changed, uplink_bps, epoch=(1, 2), previous=entered),
        ),
        _timed("one joins", lambda: admit(first, newcomer, chains=chains, epoch=(1, 2))),
        _timed("one dies", lambda: excise(first, [dying], epoch=(1, 2))),
        _timed("the affected peers, and their new neighbours", find_affected),
        _timed("all join, one by one", join_all, 1),
    ]


def _timed(what: str, run: Callable[[], object], repeats: int = REPEATS) -> dict[str, Any]:
    took: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    took.sort()
    return {"what": what, "best_s": took[0], "median_s": took[len(took) // 2]}
