"""Broadcasts that are measured to be compared with simulated ones: real processes on a network on loopback, undisturbed or struck in the middle.

What a model of links does not know is learnt from a broadcast of its own: what of a way's rate is payload (headers, hashes and the network's own burst), and what a
hop adds beside a piece's time (checking it, waking up).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from netem.fleet import HUB, Fleet
from p2pcast.artifact.piece_size import piece_bytes

SLOW_SHARE = 0.35
"""Of its rate, what a slowed peer keeps, in and out."""
PLACES = ("head", "middle")

SCENARIOS = {
    "undisturbed": "nothing happens",
    "kill head": "the head of the longest chain is killed in the middle of the broadcast",
    "kill middle": "the one below it is killed",
    "slow head": f"the head's ways fall to {SLOW_SHARE:g} of their rate in the middle of the broadcast",
    "slow middle": "those of the one below it",
}


@dataclass(frozen=True, slots=True)
class Costs:
    """``share``: of a way's rate that payload gets. ``hop_s``: a hop's own time, beside a piece's."""

    share: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """``parent``: of each peer before it began, ``HUB`` or another. ``times_s``: from the first byte at a head to each peer's last. ``victim``: who was struck,
    after ``struck_s``."""

    chains: list[list[str]]
    """The longest first."""
    parent: dict[str, str]
    times_s: dict[str, float]
    payload_bytes: int
    victim: str | None
    struck_s: float

    @property
    def last_s(self) -> float:
        """Of all but the victim."""
        return max(s for peer, s in self.times_s.items() if peer != self.victim)


def learn(chain: Sequence[str], times_s: Mapping[str, float], payload_bytes: int, rate_bytes_s: float) -> Costs:
    """From a chain of at least two that nothing disturbed."""
    share = payload_bytes / times_s[chain[0]] / rate_bytes_s
    hops_s = [times_s[below] - times_s[above] for above, below in pairwise(chain)]
    return Costs(share, max(0.0, fmean(hops_s) - piece_bytes(payload_bytes) / (share * rate_bytes_s)))


async def measure(fleet: Fleet, scenario: str) -> Measured:
    """One version; the fleet is whole again afterwards. Raises FleetError."""
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
