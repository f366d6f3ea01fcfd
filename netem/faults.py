"""The fault matrix: what goes wrong × where in a chain × when in a broadcast, done to real processes, and what became of it.

The rule of each row: every survivor ends bit for bit, nobody is sent a byte twice, and what had gone wrong is part of the swarm again once it is mended.
Times are measured, by whoever wants to know them (``p2pcast bench faults``); nothing here judges them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from netem.fleet import HUB, Fleet
from netem.hostile import GARBAGE, HONEST, MUTE
from p2pcast.limits import PIECE_BYTES

OUTAGE_S = 1.5
"""How long a hub is out of order that is not killed: nobody stands in for it for ever."""
FLAPS = 4
FLAP_S = 0.4
SLOW_SHARE = 0.7
"""Of the usual rate, to the head of the second chain until the hub is struck: so the chains hold different pieces."""

FAULTS = {
    "kill": "the process is killed",
    "several": "it and its neighbour are killed at once",
    "flap": f"its connections are reset {FLAPS} times, {FLAP_S} s apart",
    "mute": "it takes bytes, says that it is alive, and forwards none",
    "garbage": "it forwards garbage",
    "half-open": "nothing reaches it or comes from it, nothing is closed",
    "stop": "the process is frozen (SIGSTOP)",
    "one-way": "what it sends to its child is lost (to a tail: what its parent sends), all else arrives",
}
POSITIONS = ("head", "middle", "tail", HUB)
MOMENTS = ("start", "middle", "last")


@dataclass(frozen=True, slots=True)
class Case:
    fault: str
    position: str
    moment: str

    def __str__(self) -> str:
        return f"{self.fault} {self.position} {self.moment}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``gap_s``: the longest time in which a survivor that lacked something got nothing, from the fault on. ``all_s``: from publishing until all
    survivors have installed it. ``outage_s``: how long the hub was out of order."""

    case: Case
    gap_s: float
    all_s: float
    outage_s: float
    duplicate_bytes: int
    wrong: tuple[str, ...]
    """Who ended with other bits, victims too once they are back."""


def matrix() -> Iterator[Case]:
    """Every case that can do harm: a tail that feeds nobody can't mute anybody."""
    for fault in FAULTS:
        for position in POSITIONS:
            if position != "tail" or fault not in ("mute", "garbage"):
                yield from (Case(fault, position, moment) for moment in MOMENTS)


async def undisturbed(fleet: Fleet, runs: int) -> float:
    """Seconds from publishing until all have installed it, the median."""
    return median([await _broadcast(fleet) for _ in range(runs)])


async def _broadcast(fleet: Fleet) -> float:
    await fleet.chains()
    loop = asyncio.get_running_loop()
    began = loop.time()
    fleet.publish()
    await fleet.live(*fleet.names)
    return loop.time() - began


@dataclass(slots=True)
class _Strike:
    """One case, with names put in."""

    fleet: Fleet
    case: Case
    chain: list[str]
    others: list[str]

    @property
    def victims(self) -> list[str]:
        """The second one is struck by ``several`` alone."""
        head, middle, *rest = self.chain
        found = {"head": [head, middle], "middle": [middle, rest[0]], "tail": self.chain[:-3:-1], HUB: [HUB, head]}
        return found[self.case.position][: 2 if self.case.fault == "several" else 1]

    @property
    def watched(self) -> str:
        """Whose progress says that the moment has come: the victim's child, or a tail itself."""
        return [*self.chain, self.chain[-1]][[HUB, *self.chain].index(self.victims[0])]

    @property
    def dead(self) -> list[str]:
        """Peers from which nothing can be expected until they are mended."""
        lost = self.case.fault in ("kill", "several", "stop", "half-open")
        return [v for v in self.victims if v != HUB] if lost else []

    async def strike(self) -> None:
        fleet, net, victim = self.fleet, self.fleet.net, self.victims[0]
        match self.case.fault:
            case "kill" | "several":
                await asyncio.gather(*map(fleet.kill, self.victims))
            case "flap":
                for _ in range(FLAPS):
                    await net.hang_up(victim)
                    await asyncio.sleep(FLAP_S)
            case "mute":
                fleet.send(victim, MUTE)
            case "garbage":
                fleet.send(victim, GARBAGE)
            case "half-open":
                net.cut((victim, "*"), ("*", victim))
            case "stop":
                fleet.send(victim, signal.SIGSTOP)
            case "one-way":
                place = [HUB, *self.chain]
                at = min(place.index(victim), len(place) - 2)
                net.cut((place[at], place[at + 1]))

    async def mend(self) -> None:
        fleet = self.fleet
        match self.case.fault:
            case "kill" | "several":
                for victim in self.victims:
                    await fleet.start(victim)
            case "mute" | "garbage":
                fleet.send(self.victims[0], HONEST)
            case "half-open" | "one-way":
                fleet.net.mend()
            case "stop":
                fleet.send(self.victims[0], signal.SIGCONT)

    async def hub_outage(self) -> float:
        """Have the hub out of order for a while, or for as long as a killed one takes to come back; how long that was."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self.case.fault in ("kill", "several"):
            await self.fleet.start(HUB)
            await self.fleet.answers(HUB)
        elif self.case.fault != "flap":
            await asyncio.sleep(OUTAGE_S)
            await self.mend()
        return loop.time() - began


async def run_case(fleet: Fleet, case: Case) -> Outcome:
    """Raises FleetError when the swarm does not come through."""
    chain, others, *_ = await fleet.chains()
    blow = _Strike(fleet, case, chain, others)
    survivors = [n for n in fleet.names if n not in blow.dead]
    net, loop = fleet.net, asyncio.get_running_loop()
    before = {n: await _duplicate(fleet, n) for n in survivors}
    net.reset()
    if case.position == HUB:
        net.rates[HUB, others[0]] = net.rate_bytes_s * SLOW_SHARE
    began = loop.time()
    fleet.publish()
    moments = {"start": 1, "middle": fleet.payload_bytes // 2, "last": fleet.payload_bytes - 2 * PIECE_BYTES}
    await net.received(blow.watched, moments[case.moment])
    struck = loop.time()
    await blow.strike()
    net.rates.clear()
    outage_s = 0.0
    if case.position == HUB:
        outage_s = await blow.hub_outage()
    await fleet.live(*survivors)
    all_s = loop.time() - began
    gap_s = max(_gap(struck, net.flows[n].times) for n in survivors)
    duplicate = sum([await _duplicate(fleet, n) - before[n] for n in survivors])
    if case.position != HUB:
        await blow.mend()
    elif case.fault == "several":
        await fleet.start(blow.victims[1])
    await fleet.live(*fleet.names)
    return Outcome(case, gap_s, all_s, outage_s, duplicate, tuple(n for n in fleet.names if not fleet.exact(n)))


async def _duplicate(fleet: Fleet, name: str) -> int:
    return int((await fleet.answers(name))["bytes_duplicate"])


def _gap(since: float, times: list[float]) -> float:
    return max((b - a for a, b in pairwise([since, *(t for t in times if t >= since)])), default=0.0)
