"""The fault matrix, ``python -m tests.chaos.faults``: fault × position in a chain × moment of a broadcast, injected
into real processes, with the outcome.

Each row requires that every survivor ends with the trainer's bits, that no peer receives a byte twice, and that
repaired processes rejoin the swarm. The measured times are reported, and not judged.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import PEERS, LocalFleet
from netem.fleet.processes import FleetError
from p2pcast.cli import exit_code
from p2pcast.cli.options import RateParameter, console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.ground.limits import MIB, PIECE_BYTES
from p2pcast.process import event_loop
from tests.chaos import hostile
from tests.chaos.hostile import GARBAGE, HONEST, MUTE

PROGRAM = Path(hostile.__file__)
"""Of the fleet: it obeys the signals of ``mute`` and ``garbage``."""
CHAINS = 2
RUNS = 3
"""Number of undisturbed versions; their median time is the reference."""

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


async def undisturbed(fleet: LocalFleet, runs: int) -> float:
    """Median seconds from publishing until all peers have installed a version, without faults."""
    return median([await _broadcast(fleet) for _ in range(runs)])


async def _broadcast(fleet: LocalFleet) -> float:
    await fleet.chains()
    loop = asyncio.get_running_loop()
    began = loop.time()
    fleet.publish()
    await fleet.live(*fleet.names)
    return loop.time() - began


@dataclass(slots=True)
class _Injection:
    """A fault to be injected, with the names of the chosen processes."""

    fleet: LocalFleet
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


async def run_case(fleet: LocalFleet, case: Case) -> Outcome:
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


async def _duplicate(fleet: LocalFleet, name: str) -> int:
    return int((await fleet.answers(name))["bytes_duplicate"])


def _gap(since: float, times: list[float]) -> float:
    return max((b - a for a, b in pairwise([since, *(t for t in times if t >= since)])), default=0.0)


# -- the program


@click.command()
@click.option("--payload", type=click.IntRange(1), default=4, help="Size of a version in MiB.")
@click.option(
    "--rate", type=RateParameter(), default="16mbit", help="Rate of the path between two processes, in bits per second."
)
@click.option(
    "--only",
    multiple=True,
    metavar="WORDS",
    help='First words of the cases to run: "kill", "kill hub" or "kill hub start"; repeatable.',
)
@click.option("--deadline", type=click.FloatRange(1), default=30.0, help="Time limit for a case in seconds.")
@documented
def faults(
    payload: int, rate: float, only: tuple[str, ...], deadline: float, as_json: bool, output: Path | None
) -> None:
    """Measure recovery from each fault: the time until bytes flow again, and until all peers have the version.

    Each fault is caused at each position of a chain of three, at the start, middle and end of a broadcast.

    A hub and five peers in two chains run as processes on this machine. Proxies between them limit the rate and cut
    connections. No privileges needed. Exit code 1: a case never recovered, or a peer ended with other bits.
    """
    cases = [case for case in matrix() if not only or any(f"{case} ".startswith(f"{words} ") for words in only)]
    if not cases:
        raise click.BadParameter("no case begins with these words", param_hint="--only")
    document = event_loop.run(_measure(payload * MIB, rate / 8, cases, deadline))
    if not written(document, output, as_json=as_json):
        _show(document)
    if document["failed"] or document["wrong"]:
        sys.exit(EXIT_FAILED)


async def _measure(payload_bytes: int, rate_bytes_s: float, cases: list[Case], deadline_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        async with LocalFleet(
            Path(folder), Net(rate_bytes_s), PEERS, CHAINS, payload_bytes, deadline_s, PROGRAM
        ) as fleet:
            quiet_s = await undisturbed(fleet, RUNS)
            outcomes, failed = [], []
            for case in cases:
                try:
                    outcomes.append(await run_case(fleet, case))
                except FleetError as error:
                    failed.append(str(case))
                    click.echo(f"{case}: {error}", err=True)
                    await fleet.restart_all()
                else:
                    click.echo(f"{case}: {outcomes[-1].gap_s:.2f} s", err=True)
    return (
        _document(quiet_s, outcomes)
        | {"failed": failed}
        | {"payload_bytes": payload_bytes, "rate_bits_s": rate_bytes_s * 8}
    )


def _document(quiet_s: float, outcomes: list[Outcome]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "fault": o.case.fault,
            "position": o.case.position,
            "moment": o.case.moment,
            "gap_s": round(o.gap_s, 3),
            "all_s": round(o.all_s, 3),
            "outage_s": round(o.outage_s, 3),
            "most_s": round(1.25 * quiet_s + 1 + o.outage_s, 3),
            "bytes_duplicate": o.duplicate_bytes,
            "wrong": list(o.wrong),
        }
        for o in outcomes
    ]
    gaps = [max(0.0, o.gap_s - o.outage_s) for o in outcomes] or [0.0]
    return {
        "undisturbed_s": round(quiet_s, 3),
        "gap_median_s": round(median(gaps), 3),
        "gap_worst_s": round(max(gaps), 3),
        "late": sum(row["all_s"] > row["most_s"] for row in rows),
        "bytes_duplicate": sum(row["bytes_duplicate"] for row in rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        "rows": rows,
    }


def _show(document: dict[str, Any]) -> None:
    table = Table("fault", "position", *(f"{moment}: flows again · all, s" for moment in MOMENTS), "hub away, s")
    found = {(row["fault"], row["position"], row["moment"]): row for row in document["rows"]}
    for fault, position in dict.fromkeys((row["fault"], row["position"]) for row in document["rows"]):
        cells = [found.get((fault, position, moment)) for moment in MOMENTS]
        away = max(cell["outage_s"] for cell in cells if cell)
        shown = [f"{cell['gap_s']:.2f} · {cell['all_s']:.2f}" if cell else "" for cell in cells]
        table.add_row(fault, position, *shown, f"{away:.1f}" if away else "")
    console().print(table)
    click.echo(
        f"undisturbed {document['undisturbed_s']:.2f} s; bytes flow again after {document['gap_median_s']:.2f} s "
        f"(median) and {document['gap_worst_s']:.2f} s (worst), without the hub's absence; "
        f"{document['late']} of {len(document['rows'])} cases later than 1.25 × undisturbed + 1 s; "
        f"{document['bytes_duplicate']} duplicate bytes; {document['wrong']} cases with wrong bits; "
        f"{len(document['failed'])} cases failed{': ' if document['failed'] else ''}{', '.join(document['failed'])}"
    )


if __name__ == "__main__":
    sys.exit(exit_code(lambda: faults(standalone_mode=False)))
