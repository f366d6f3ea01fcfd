"""Broadcasts measured for comparison with simulated ones: real processes on a loopback network, undisturbed or with a
fault in the middle.

A calibration broadcast gives the two parameters that a model of links lacks. One is payload's share of a path's rate
(headers, hashes and the network's burst). The other is the time that a hop adds to a piece's transfer (verifying,
waking up).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from netem.simulation.broadcast_replay import BroadcastFault, replay
from netem.simulation.fleet_simulator import FleetEvents
from p2pcast.artifact.piece_size import piece_bytes
from topology.broadcast_time import BroadcastNetwork
from topology.plan_tree import ROOT

CHAINS = 2
WIDE_BPS = 1e12
"""Rate of the hub's uplink, in bits per second: no limit, because each of the hub's links has its own rate."""

SLOW_SHARE = 0.35
"""Share of its rate that a slowed peer keeps, in and out."""
PLACES = ("head", "middle")

SCENARIOS = {
    "undisturbed": "nothing happens",
    "kill head": "the head of the longest chain is killed in the middle of the broadcast",
    "kill middle": "the next peer below it is killed",
    "slow head": f"the rates to and from the head fall to {SLOW_SHARE:g} in the middle of the broadcast",
    "slow middle": "the same for the next peer below it",
}


@dataclass(frozen=True, slots=True)
class Costs:
    """``share``: payload's share of a path's rate. ``hop_s``: a hop's own time, beside a piece's transfer."""

    share: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class MeasuredTree:
    """``parent``: each peer's parent before the broadcast, ``HUB`` or a peer. ``times_s``: from the first byte at a
    head until each peer is complete. ``victim``: disturbed after ``struck_s``.
    """

    chains: list[list[str]]
    """Longest first."""
    parent: dict[str, str]
    times_s: dict[str, float]
    payload_bytes: int
    victim: str | None
    struck_s: float

    @property
    def last_s(self) -> float:
        """Over all peers except the victim."""
        return max(s for peer, s in self.times_s.items() if peer != self.victim)


def learn(chain: Sequence[str], times_s: Mapping[str, float], payload_bytes: int, rate_bytes_s: float) -> Costs:
    """Computed from an undisturbed chain of at least two peers."""
    share = payload_bytes / times_s[chain[0]] / rate_bytes_s
    hops_s = [times_s[below] - times_s[above] for above, below in pairwise(chain)]
    return Costs(share, max(0.0, fmean(hops_s) - piece_bytes(payload_bytes) / (share * rate_bytes_s)))


async def measure(fleet: LocalFleet, scenario: str) -> MeasuredTree:
    """Publish one version; afterwards the fleet is complete again. Raises FleetError."""
    kind, _, place = scenario.partition(" ")
    chains, parent = await fleet.chains(), await fleet.parents()
    net, loop = fleet.net, asyncio.get_running_loop()
    net.reset()
    fleet.publish()
    struck, victim = loop.time(), None
    if place:
        victim = chains[0][PLACES.index(place)]
        await net.received(victim, fleet.payload_bytes // 2)
        struck = loop.time()
    if victim is not None and kind == "kill":
        await fleet.kill(victim)
    elif victim is not None:
        ways = [(victim, other) for other in (HUB, *fleet.names)]
        net.rates.update(dict.fromkeys([*ways, *((b, a) for a, b in ways)], net.rate_bytes_s * SLOW_SHARE))
    await fleet.live(*(n for n in fleet.names if n != victim or kind != "kill"))
    began = min(net.flows[chain[0]].times[0] for chain in chains)
    times_s = {n: net.flows[n].times[-1] - began for n in fleet.names}
    size = int((await fleet.answers(HUB))["last"]["bytes"])
    net.rates.clear()
    if victim is not None and kind == "kill":
        await fleet.start(victim)
        await fleet.live(victim)
    return MeasuredTree(chains, parent, times_s, size, victim, struck - began)


async def compare(
    peers: int, payload_bytes: int, rate_bytes_s: float, scenarios: list[str], deadline_s: float
) -> dict[str, Any]:
    """The document of ``bench simulated``. Raises FleetError."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        async with LocalFleet(Path(folder), Net(rate_bytes_s), peers, CHAINS, payload_bytes, deadline_s) as fleet:
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


def simulated_s(found: MeasuredTree, scenario: str, costs: Costs, rate_bps: float) -> float:
    """Seconds until the last peer, the victim excluded, has the same broadcast in the simulator."""
    bps = costs.share * rate_bps
    network = BroadcastNetwork(
        piece_bytes=piece_bytes(found.payload_bytes), near_rtt_s=0.0, root_region="region-0", hop_s=costs.hop_s
    )
    model = FleetEvents(
        regions=1, payload_bytes=found.payload_bytes, uplink_bps=WIDE_BPS, peer_bps=bps, network=network
    )
    blows = []
    if found.victim is not None:
        blows = [
            BroadcastFault(found.struck_s, found.victim, None if scenario.startswith("kill") else SLOW_SHARE * bps)
        ]
    parent = {peer: ROOT if above == HUB else above for peer, above in found.parent.items()}
    times_s = replay(model, parent, blows, CHAINS)
    return max(s for peer, s in times_s.items() if peer != found.victim)
