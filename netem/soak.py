"""The soak: a fleet of real processes through many versions, while every second somebody is killed, frozen, slowed down or comes back (``netem.storm``).

The rule: a peer that nothing is done to gets every version, bit for bit, within the deadline; in the end everybody has the newest, bit for bit, and so does whoever had been struck;
nobody that was left alone was sent a byte twice; what processes hold is flat (``netem.flat``), each over its life and the fleet as a whole between the rest before the storm and the rest after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from netem import gauge, storm
from netem.fleet import HUB, POLL_S, Fleet, FleetError
from netem.gauge import Reading
from netem.storm import Blow, Storm

BLOW_S: Final = 1.0
READ_S: Final = 4.0
"""Between readings of all processes."""
REST_S: Final = 6.0
"""Without versions and without blows, before and after the storm: what a fleet costs that has nothing to do."""
SETTLE_S: Final = 3.0
"""Before each rest: links that were left behind end, and the plan is repaired."""
SLOW_SHARE: Final = 0.1
CALM_VERSIONS: Final = 3
"""Before the storm: caches fill, and their times are what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Struck:
    t_s: float
    blow: Blow


@dataclass(slots=True)
class Round:
    """One version. ``t_s``: when it was published. ``hub_struck``: the hub was out of order in that time. ``waited_for``: the peers that had the one before and were in order when it was published; ``times_s``: from publishing until each peer had
    installed it, of those to which nothing was done before that."""

    step: int
    t_s: float
    calm: bool
    waited_for: int
    hub_struck: bool = False
    times_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Life:
    """One process, from start to end."""

    name: str
    pid: int
    readings: list[Reading] = field(default_factory=list)
    duplicate_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rest:
    """All processes by name, at the beginning and the end of a time in which nothing happened; ``log_bytes``: what they wrote meanwhile."""

    seconds: float
    first: dict[str, Reading]
    last: dict[str, Reading]
    log_bytes: int


class Soak:
    """``run`` once; what it found is in the attributes. ``every_s``: from one version to the next, at least; ``rest_s``: each rest, beside what settling takes."""

    def __init__(
        self, fleet: Fleet, versions: int, storm: Storm, every_s: float, deadline_s: float, rest_s: float = REST_S
    ) -> None:
        self.fleet = fleet
        self.versions = versions
        self.storm = storm
        self.struck: list[Struck] = []
        self.rounds: list[Round] = []
        self.lives: dict[int, Life] = {}
        self.rests: list[Rest] = []
        self.wrong: list[str] = []
        """``NAME STEP``: installed with other bits."""
        self._every_s = every_s
        self._rest_s = rest_s
        self._deadline_s = deadline_s
        self._over = asyncio.Event()
        """The storm."""
        self._resting = False
        """Nobody is disturbed by our questions."""
        self._hit_at: dict[str, float] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._looked: defaultdict[str, int] = defaultdict(int)
        """Name → the step that was last compared with the trainer's."""

    async def run(self) -> None:
        """Raises FleetError when a version does not arrive, or a process does what it must not."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        readings = asyncio.create_task(self._read_on(), name="readings")
        try:
            for _ in range(CALM_VERSIONS):
                await self._version(calm=True)
            await self._rest()
            raging = asyncio.create_task(self._rage(), name="storm")
            try:
                for _ in range(self.versions):
                    await self._version(calm=False)
                    if raging.done():
                        break
                self._over.set()
                await raging
            finally:
                raging.cancel()
                await asyncio.wait([raging])
            for blow in self.storm.calm():
                await self._strike(blow)
            await asyncio.gather(*self._leaving.values())
            await self._all_current()
            await self._rest()
        finally:
            readings.cancel()
            await asyncio.wait([readings])
        if not readings.cancelled():
            readings.result()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    # -- versions

    async def _version(self, *, calm: bool) -> None:
        fleet, began = self.fleet, self._now()
        before = fleet.step
        waited = {n for n in fleet.names if n not in self.storm.out and fleet.installed(n, before)}
        fleet.publish()
        this = Round(fleet.step, began, calm, len(waited))
        self.rounds.append(this)
        while waited:
            await self.fleet.supervise()
            for name in sorted(waited):
                if self._hit_at.get(name, -1.0) >= began:
                    waited.discard(name)
                elif fleet.installed(name, this.step):
                    this.times_s[name] = self._now() - began
                    waited.discard(name)
                    await self._compare(name, this.step)
            if self._now() - began > self._deadline_s:
                raise FleetError(f"{fleet.version} not within {self._deadline_s:.0f} s at {', '.join(sorted(waited))}")
            await asyncio.sleep(POLL_S)
        this.hub_struck = HUB in self.storm.out or self._hit_at.get(HUB, -1.0) >= began
        await asyncio.sleep(max(0.0, began + self._every_s - self._now()))

    async def _compare(self, name: str, step: int) -> None:
        try:
            if not await asyncio.to_thread(self.fleet.exact, name, step):
                self.wrong.append(f"{name} {step}")
        except FileNotFoundError:
            # It has the next one already.
            return
        self._looked[name] = step

    async def _all_current(self) -> None:
        """Everybody has the newest version, bit for bit."""
        fleet, began = self.fleet, self._now()
        missing = set(fleet.names)
        while missing:
            await fleet.supervise()
            missing = {n for n in missing if not fleet.installed(n, fleet.step)}
            if self._now() - began > self._deadline_s:
                raise FleetError(
                    f"{fleet.version} not within {self._deadline_s:.0f} s of the end at {', '.join(sorted(missing))}"
                )
            await asyncio.sleep(POLL_S)
        for name in fleet.names:
            await self._compare(name, fleet.step)
        if late := [n for n in fleet.names if self._looked[n] != fleet.step]:
            raise FleetError(f"{fleet.version} is gone again at {', '.join(late)}")

    # -- the storm

    async def _rage(self) -> None:
        loop, at = asyncio.get_running_loop(), self._now()
        while not self._over.is_set():
            # To its end: who is to come back is started again only then.
            await self._strike(self.storm.next())
            at += BLOW_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, at - (loop.time() - self._began))):
                    await self._over.wait()

    async def _strike(self, blow: Blow) -> None:
        fleet, name = self.fleet, blow.name
        self.struck.append(Struck(self._now(), blow))
        self._hit_at[name] = self._now()
        ended = self._leaving.pop(name, None)
        if ended is not None:
            await ended
        match blow.what:
            case storm.KILL:
                await fleet.kill(name)
            case storm.LEAVE:
                self._leaving[name] = asyncio.create_task(fleet.leave(name, self._deadline_s), name=f"{name} leaves")
            case storm.STOP:
                fleet.send(name, signal.SIGSTOP)
            case storm.SLOW:
                fleet.net.slow[name] = SLOW_SHARE
            case storm.ANEW:
                for folder in (name, f"{name}-shadow", f"{name}-out"):
                    await asyncio.to_thread(shutil.rmtree, fleet.folder / folder, ignore_errors=True)
                await fleet.start(name)
            case _:
                await self._back(name)

    async def _back(self, name: str) -> None:
        if self.fleet.pid(name) is None:
            await self.fleet.start(name)
        elif name in self.fleet.net.slow:
            del self.fleet.net.slow[name]
        else:
            self.fleet.send(name, signal.SIGCONT)

    # -- what they hold

    async def _rest(self) -> None:
        self._resting = True
        await asyncio.sleep(SETTLE_S)
        logged, began = self._log_bytes(), self._now()
        first = await self._read_all()
        await asyncio.sleep(self._rest_s)
        last = await self._read_all()
        self.rests.append(Rest(self._now() - began, first, last, self._log_bytes() - logged))
        self._resting = False

    def _log_bytes(self) -> int:
        return sum(self.fleet.log(n).stat().st_size for n in (HUB, *self.fleet.names))

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(READ_S)
            if not self._resting:
                await self._read_all()

    async def _read_all(self) -> dict[str, Reading]:
        names = [HUB, *self.fleet.names]
        found = await asyncio.gather(*map(self._read, names))
        return {name: reading for name, reading in zip(names, found, strict=True) if reading is not None}

    async def _read(self, name: str) -> Reading | None:
        """Nothing of one that does not answer: frozen, or not there yet."""
        pid = self.fleet.pid(name)
        metrics = await self.fleet.asked(name, "metrics")
        if pid is None or metrics is None or self.fleet.pid(name) != pid:
            return None
        said = gauge.said(metrics)
        reading = await asyncio.to_thread(gauge.read, pid, self._now(), said)
        if reading is not None:
            life = self.lives.setdefault(pid, Life(name, pid))
            life.readings.append(reading)
            life.duplicate_bytes = round(said["p2pcast_duplicate_bytes_total"])
        return reading
