"""Broadcasts measured for comparison with simulated ones: real processes on a loopback network, undisturbed or with a
fault in the middle.

A calibration broadcast gives the two parameters that a model of links lacks. One is payload's share of a path's rate
(headers, hashes and the network's burst). The other is the time that a hop adds to a piece's transfer (verifying,
waking up).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from netem.fleet.local_fleet import HUB, Fleet
from p2pcast.artifact.piece_size import piece_bytes

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
class Measured:
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


async def measure(fleet: Fleet, scenario: str) -> Measured:
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
    return Measured(chains, parent, times_s, size, victim, struck - began)
