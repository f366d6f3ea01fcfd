"""The fault matrix: fault × position in a chain × moment of a broadcast, injected into real processes, with the
outcome.

Each row requires that every survivor ends with the trainer's bits, that no peer receives a byte twice, and that
repaired processes rejoin the swarm. ``p2pcast bench faults`` reports the measured times; this module does not judge
them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from netem.fleet.hostile import GARBAGE, HONEST, MUTE
from netem.fleet.local_fleet import HUB, Fleet
from p2pcast.ground.limits import PIECE_BYTES

OUTAGE_S = 1.5
"""Duration of a hub fault other than a kill; the hub has no stand-in, so it must return."""
FLAPS = 4
FLAP_S = 0.4
SLOW_SHARE = 0.7
"""Share of the usual rate to the head of the second chain until the hub's fault. The chains then hold different pieces.
"""

FAULTS = {
    "kill": "the process is killed",
    "several": "the process and its neighbour are killed at once",
    "flap": f"its connections are reset {FLAPS} times, {FLAP_S} s apart",
    "mute": "the process accepts bytes and sends keepalives, and forwards no piece",
    "garbage": "the process forwards garbage",
    "half-open": "no packet reaches or leaves the process, and no connection closes",
    "stop": "the process is frozen (SIGSTOP)",
    "one-way": "the packets from the process to its child are lost (for a tail: from its parent), all others arrive",
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
    """``gap_s``: the longest time in which an incomplete survivor received nothing, from the fault on. ``all_s``: from
    publishing until all survivors have installed the version. ``outage_s``: duration of the hub's outage.
    """

    case: Case
    gap_s: float
    all_s: float
    outage_s: float
    duplicate_bytes: int
    wrong: tuple[str, ...]
    """Peers that ended with other bits, repaired victims included."""


def matrix() -> Iterator[Case]:
    """All cases with an effect: a tail has no child, so a mute or garbage tail is left out."""
    for fault in FAULTS:
        for position in POSITIONS:
            if position != "tail" or fault not in ("mute", "garbage"):
                yield from (Case(fault, position, moment) for moment in MOMENTS)


async def undisturbed(fleet: Fleet, runs: int) -> float:
    """Median seconds from publishing until all peers have installed a version, without faults."""
    return median([await _broadcast(fleet) for _ in range(runs)])


async def _broadcast(fleet: Fleet) -> float:
    await fleet.chains()
    loop = asyncio.get_running_loop()
    began = loop.time()
    fleet.publish()
    await fleet.live(*fleet.names)
    return loop.time() - began


@dataclass(slots=True)
class _Injection:
    """A fault to be injected, with the names of the chosen processes."""

    fleet: Fleet
    case: Case
    chain: list[str]
    others: list[str]

    @property
    def victims(self) -> list[str]:
        """The processes to disturb; only ``several`` disturbs the second one."""
        head, middle, *rest = self.chain
        found = {"head": [head, middle], "middle": [middle, rest[0]], "tail": self.chain[:-3:-1], HUB: [HUB, head]}
        return found[self.case.position][: 2 if self.case.fault == "several" else 1]

    @property
    def watched(self) -> str:
        """The peer identify progress triggers the fault: the victim's child, or the tail itself."""
        return [*self.chain, self.chain[-1]][[HUB, *self.chain].index(self.victims[0])]

    @property
    def dead(self) -> list[str]:
        """Peers that cannot finish the version before they are repaired."""
        lost = self.case.fault in ("kill", "several", "stop", "half-open")
        return [v for v in self.victims if v != HUB] if lost else []

    async def inject(self) -> None:
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

    async def repair(self) -> None:
        fleet = self.fleet
        match self.case.fault:
            case "kill" | "several":
                for victim in self.victims:
                    await fleet.start(victim)
            case "mute" | "garbage":
                fleet.send(self.victims[0], HONEST)
            case "half-open" | "one-way":
                fleet.net.restore()
            case "stop":
                fleet.send(self.victims[0], signal.SIGCONT)

    async def hub_outage(self) -> float:
        """Keep the hub out for OUTAGE_S, or until a killed hub has restarted; returns the duration."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self.case.fault in ("kill", "several"):
            await self.fleet.start(HUB)
            await self.fleet.answers(HUB)
        elif self.case.fault != "flap":
            await asyncio.sleep(OUTAGE_S)
            await self.repair()
        return loop.time() - began


async def run_case(fleet: Fleet, case: Case) -> Outcome:
    """Raises FleetError if the swarm does not recover."""
    chain, others, *_ = await fleet.chains()
    injection = _Injection(fleet, case, chain, others)
    survivors = [n for n in fleet.names if n not in injection.dead]
    net, loop = fleet.net, asyncio.get_running_loop()
    before = {n: await _duplicate(fleet, n) for n in survivors}
    net.reset()
    if case.position == HUB:
        net.rates[HUB, others[0]] = net.rate_bytes_s * SLOW_SHARE
    began = loop.time()
    fleet.publish()
    moments = {"start": 1, "middle": fleet.payload_bytes // 2, "last": fleet.payload_bytes - 2 * PIECE_BYTES}
    await net.received(injection.watched, moments[case.moment])
    injected_at = loop.time()
    await injection.inject()
    net.rates.clear()
    outage_s = 0.0
    if case.position == HUB:
        outage_s = await injection.hub_outage()
    await fleet.live(*survivors)
    all_s = loop.time() - began
    gap_s = max(_gap(injected_at, net.flows[n].times) for n in survivors)
    duplicate = sum([await _duplicate(fleet, n) - before[n] for n in survivors])
    if case.position != HUB:
        await injection.repair()
    elif case.fault == "several":
        await fleet.start(injection.victims[1])
    await fleet.live(*fleet.names)
    return Outcome(case, gap_s, all_s, outage_s, duplicate, tuple(n for n in fleet.names if not fleet.exact(n)))


async def _duplicate(fleet: Fleet, name: str) -> int:
    return int((await fleet.answers(name))["bytes_duplicate"])


def _gap(since: float, times: list[float]) -> float:
    return max((b - a for a, b in pairwise([since, *(t for t in times if t >= since)])), default=0.0)
