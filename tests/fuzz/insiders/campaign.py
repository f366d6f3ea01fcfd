"""A swarm of real processes with insiders in it. Versions are published before, during and after the insiders'
messages, and memory is read at the end of each phase.

The rule: no process ends, and no process logs an unexpected error. Memory does not grow with the number of messages.
Every honest peer installs the trainer's bytes. While ranks among the insiders may publish versions of their own, honest
peers must hold the same bytes as the hub, version by version.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from insiders.insider import Insider, Place
from insiders.values import World

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import LocalFleet
from netem.fleet.processes import FleetError
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.limits import MIB
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection_state import ConnectionState
from tests.chaos import daemon_logs, process_stats

LEAD: Final = "p3"
"""A peer that leads an engine whose server does not answer; insiders connect to it."""
AT_ONCE: Final = 6
MESSAGES: Final = 250
"""Messages of one insider over some connections; then another insider follows, with a new certificate and quota."""
WALKS: Final = 4
WARM: Final = 0.2
"""Share of the messages that are sent before memory is read for the first time: kernels load, quotas and caches fill.
"""
RANKS: Final = 0.2
"""Share of the messages that are sent while ranks are among the insiders."""


@dataclass(slots=True)
class Outcome:
    """``memory``: process → anonymous bytes after the first phase and at the end. ``unexpected``: log lines."""

    tally: Counter[str] = field(default_factory=Counter)
    versions: int = 0
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        grown = {name: round((after - before) / MIB, 1) for name, (before, after) in self.memory.items()}
        return {
            "sent": self.tally["sent"],
            "heard": self.tally["heard"],
            "connections": self.tally["connections"],
            "shown out": self.tally["shown out"],
            "given up": self.tally["given up"],
            "versions": self.versions,
            "wrong": self.wrong,
            "unexpected": self.unexpected,
            "grown MiB": grown,
        }


class Infiltrated(LocalFleet):
    """Two honest peers, and one peer that leads an engine. A malicious rank may have begun another branch, so the hub's
    status decides which version is the newest.
    """

    def __init__(self, folder: Path, payload_bytes: int = MIB, deadline_s: float = 180.0) -> None:
        super().__init__(folder, Net(64 * MIB), 3, 1, payload_bytes, deadline_s, "p2pcast.cli", plaintext=False)
        self.options[LEAD] = ["--install", "vllm:http://127.0.0.1:9", "--engine", "big", "--role", "lead"]
        self.honest = [name for name in self.names if name != LEAD]

    async def live(self, *names: str) -> None:
        """Return when the honest peers have installed the version published last."""
        waiting = {name for name in names if name in self.honest}

        async def look() -> bool:
            head = ((await self.status(HUB)) or {}).get("version")
            if head is None or head.partition(".")[2] != str(self.step):
                return False
            for name in sorted(waiting):
                if (await self.status(name) or {}).get("committed") == head:
                    waiting.discard(name)
            return not waiting

        await self.until(look, lambda: f"step {self.step} at {', '.join(sorted(waiting))}")

    async def memory(self) -> dict[str, int]:
        held = {}
        for name in [HUB, *self.names]:
            await self.answers(name)
            reading = await process_stats.reading(self, name, 0.0)
            if reading is None:
                raise FleetError(f"{name} is gone")
            held[name] = reading.anonymous_bytes
        return held


async def infiltrate(fleet: Infiltrated, count: int, seed: int, outcome: Outcome, *, at_once: int = AT_ONCE) -> None:
    """Continue until ``count`` messages were processed. Raises FleetError if the swarm does not deliver a version."""
    world, draw = World(), random.Random(seed)
    world.binary[16] = {bytes.fromhex(str((await fleet.answers(name))["node"])): None for name in fleet.names}
    await _version(fleet, outcome)
    peers: list[ConnectionState] = [
        ConnectionState.CONTROL,
        ConnectionState.CONTROL,
        ConnectionState.DATA,
        ConnectionState.DATA,
        ConnectionState.ENGINE,
    ]
    phases: list[tuple[float, list[ConnectionState], bool]] = [
        (WARM, peers, True),
        (1 - RANKS, peers, True),
        (1.0, [ConnectionState.PUBLISH, *peers], False),
    ]
    before: dict[str, int] = {}
    for share, states, exact in phases:
        work = asyncio.create_task(_phase(fleet, round(share * count), draw, world, outcome, states, at_once))
        try:
            while not work.done():
                if exact:
                    await _version(fleet, outcome)
                else:
                    fleet.publish()
                await asyncio.wait([work], timeout=1.0)
                fleet.still_run()
        finally:
            work.cancel()
            await asyncio.wait([work])
        work.result()
        before = before or await fleet.memory()
    await _agree(fleet, outcome)
    await _version(fleet, outcome)
    after = await fleet.memory()
    outcome.memory = {name: (before[name], after[name]) for name in before}
    outcome.unexpected = daemon_logs.unexpected(fleet)


async def _version(fleet: Infiltrated, outcome: Outcome) -> None:
    fleet.publish()
    await fleet.live(*fleet.names)
    outcome.versions += 1
    outcome.wrong += [f"{name} at step {fleet.step}" for name in fleet.honest if not fleet.exact(name)]


async def _agree(fleet: Infiltrated, outcome: Outcome) -> None:
    """Compare the honest peers' copies of a version with the hub's copy."""
    digests = (await fleet.answers(HUB))["digests"]
    for name in fleet.honest:
        for version, digest in (await fleet.answers(name))["digests"].items():
            if digests.get(version, digest) != digest:
                outcome.wrong.append(f"{name} at {version}: state differs from the hub's")


async def _phase(
    fleet: Infiltrated,
    until: int,
    draw: random.Random,
    world: World,
    outcome: Outcome,
    states: Sequence[ConnectionState],
    at_once: int,
) -> None:
    """Continue until ``until`` messages were processed in total. Insiders that wait then, over their rate limit or
    without reading, go at once.
    """

    async def one() -> None:
        while outcome.tally["heard"] < until:
            await _visit(fleet, draw.randrange(1 << 62), world, outcome, states)

    visits = [asyncio.create_task(one()) for _ in range(at_once)]
    try:
        done, _ = await asyncio.wait(visits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for visit in visits:
            visit.cancel()
        await asyncio.wait(visits)
    for visit in done:
        visit.result()


async def _visit(
    fleet: Infiltrated, seed: int, world: World, outcome: Outcome, states: Sequence[ConnectionState]
) -> None:
    """One insider, from its certificate to its end."""
    tally, hub, token = outcome.tally, fleet.place(HUB), JoinToken.parse(fleet.token)
    insider = Insider(seed, token, world, tally)
    chosen = insider.draw.choice(states)
    try:
        await insider.enter(hub, "trainer" if chosen is ConnectionState.PUBLISH else "peer")
        if insider.draw.random() < 0.3 and chosen is ConnectionState.CONTROL:
            await insider.listen()
        for _ in range(WALKS):
            tally["connections"] += 1
            with contextlib.suppress(P2PCastError, OSError):
                await insider.walk(chosen, _target(fleet, insider, chosen), MESSAGES // WALKS)
                continue
            tally["shown out"] += 1
    except TimeoutError:
        tally["given up"] += 1
    except (P2PCastError, OSError):
        tally["refused"] += 1
    finally:
        await insider.close()


def _target(fleet: Infiltrated, insider: Insider, state: ConnectionState) -> Place:
    if state is ConnectionState.ENGINE:
        return fleet.place(LEAD)
    return fleet.place(HUB if state is not ConnectionState.DATA else insider.draw.choice([HUB, *fleet.names]))
