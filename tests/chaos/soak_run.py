"""A soak: a fleet of real processes through many versions, while one fault or repair happens every second
(``tests.chaos.fault_schedule``).

The rule has four parts. A peer without faults installs every version, bit for bit, within the deadline. At the end all
peers hold the newest version, bit for bit. No undisturbed peer receives a byte twice. The resources of processes stay
flat (``tests.chaos.leak_check``): each over its life, and the fleet as a whole between the idle periods before and
after the faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from netem.emulation.description import HUB
from netem.fleet.local_fleet import POLL_S, LocalFleet
from netem.fleet.processes import FleetError
from tests.chaos import fault_schedule, process_stats
from tests.chaos.fault_schedule import Fault, FaultSchedule
from tests.chaos.process_stats import Reading

FAULT_INTERVAL_S: Final = 1.0
READ_S: Final = 4.0
"""Interval between readings of all processes."""
IDLE_S: Final = 6.0
"""Length of the idle periods before and after the faults; they show the cost of an idle fleet."""
SETTLE_S: Final = 3.0
"""Pause before each idle period: abandoned links end, and the plan is repaired."""
SLOW_SHARE: Final = 0.1
UNDISTURBED_VERSIONS: Final = 3
"""Versions before the first fault: caches fill, and later times are compared with theirs."""


@dataclass(frozen=True, slots=True)
class TimedFault:
    t_s: float
    fault: Fault


@dataclass(slots=True)
class Round:
    """One version. ``t_s``: time of publishing. ``hub_struck``: the hub was disturbed during this version.
    ``waited_for``: the undisturbed peers that had the previous version at that time. ``times_s``: seconds from
    publishing to installation of each peer that stayed undisturbed.
    """

    step: int
    t_s: float
    undisturbed: bool
    waited_for: int
    hub_struck: bool = False
    times_s: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class ProcessHistory:
    """One process, from start to end."""

    name: str
    pid: int
    readings: list[Reading] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class IdlePeriod:
    """Readings of all processes by name at the beginning and the end of an idle period. ``log_bytes``: written to logs
    meanwhile.
    """

    seconds: float
    first: dict[str, Reading]
    last: dict[str, Reading]
    log_bytes: int


class Soak:
    """``run`` once; the attributes hold the results. ``every_s``: least interval between versions. ``rest_s``: length
    of each idle period after settling.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        versions: int,
        schedule: FaultSchedule,
        every_s: float,
        deadline_s: float,
        rest_s: float = IDLE_S,
    ) -> None:
        self.fleet = fleet
        self.versions = versions
        self.schedule = schedule
        self.faults: list[TimedFault] = []
        self.rounds: list[Round] = []
        self.histories: dict[int, ProcessHistory] = {}
        self.idle_periods: list[IdlePeriod] = []
        self.wrong: list[str] = []
        """``NAME STEP``: installed with other bits."""
        self._every_s = every_s
        self._idle_s = rest_s
        self._deadline_s = deadline_s
        self._finished = asyncio.Event()
        """Set when the faults are to end."""
        self._idling = False
        """True during an idle period, in which no metrics are requested."""
        self._faulted_at: dict[str, float] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._compared: defaultdict[str, int] = defaultdict(int)
        """Name → the newest step compared with the trainer's."""

    async def run(self) -> None:
        """Raises FleetError if a version does not arrive in time, or if a process ends unexpectedly."""
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        readings = asyncio.create_task(self._read_on(), name="readings")
        try:
            for _ in range(UNDISTURBED_VERSIONS):
                await self._version(undisturbed=True)
            await self._idle()
            injecting = asyncio.create_task(self._inject_faults(), name="faults")
            try:
                for _ in range(self.versions):
                    await self._version(undisturbed=False)
                    if injecting.done():
                        break
                self._finished.set()
                await injecting
            finally:
                injecting.cancel()
                await asyncio.wait([injecting])
            for fault in self.schedule.repair_all():
                await self._inject(fault)
            await asyncio.gather(*self._leaving.values())
            await self._all_current()
            await self._idle()
        finally:
            readings.cancel()
            await asyncio.wait([readings])
        if not readings.cancelled():
            readings.result()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    # -- versions

    async def _version(self, *, undisturbed: bool) -> None:
        fleet, began = self.fleet, self._now()
        before = fleet.step
        awaited = {n for n in fleet.names if n not in self.schedule.disturbed and fleet.installed(n, before)}
        fleet.publish()
        this = Round(fleet.step, began, undisturbed, len(awaited))
        self.rounds.append(this)
        while awaited:
            await self.fleet.supervise()
            for name in sorted(awaited):
                if self._faulted_at.get(name, -1.0) >= began:
                    awaited.discard(name)
                elif fleet.installed(name, this.step):
                    this.times_s[name] = self._now() - began
                    awaited.discard(name)
                    await self._compare(name, this.step)
            if self._now() - began > self._deadline_s:
                raise FleetError(f"{fleet.version} not within {self._deadline_s:.0f} s at {', '.join(sorted(awaited))}")
            await asyncio.sleep(POLL_S)
        this.hub_struck = HUB in self.schedule.disturbed or self._faulted_at.get(HUB, -1.0) >= began
        await asyncio.sleep(max(0.0, began + self._every_s - self._now()))

    async def _compare(self, name: str, step: int) -> None:
        try:
            if not await asyncio.to_thread(self.fleet.exact, name, step):
                self.wrong.append(f"{name} {step}")
        except FileNotFoundError:
            # The peer has installed the next version already.
            return
        self._compared[name] = step

    async def _all_current(self) -> None:
        """Return when all peers hold the newest version, compared bit for bit."""
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
        if late := [n for n in fleet.names if self._compared[n] != fleet.step]:
            raise FleetError(f"{fleet.version} was replaced before its comparison at {', '.join(late)}")

    # -- faults

    async def _inject_faults(self) -> None:
        loop, at = asyncio.get_running_loop(), self._now()
        while not self._finished.is_set():
            # Finish a repair before stopping: it restarts a process that is counted on later.
            await self._inject(self.schedule.next())
            at += FAULT_INTERVAL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, at - (loop.time() - self._began))):
                    await self._finished.wait()

    async def _inject(self, fault: Fault) -> None:
        fleet, name = self.fleet, fault.name
        self.faults.append(TimedFault(self._now(), fault))
        self._faulted_at[name] = self._now()
        ended = self._leaving.pop(name, None)
        if ended is not None:
            await ended
        match fault.what:
            case fault_schedule.KILL:
                await fleet.kill(name)
            case fault_schedule.LEAVE:
                self._leaving[name] = asyncio.create_task(fleet.leave(name, self._deadline_s), name=f"{name} leaves")
            case fault_schedule.STOP:
                fleet.send(name, signal.SIGSTOP)
            case fault_schedule.SLOW:
                fleet.net.slow[name] = SLOW_SHARE
            case fault_schedule.FRESH:
                for folder in (fleet.core.state(name), fleet.core.shadow(name), fleet.core.installed(name)):
                    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                await fleet.start(name)
            case _:
                await self._restore(name)

    async def _restore(self, name: str) -> None:
        if self.fleet.pid(name) is None:
            await self.fleet.start(name)
        elif name in self.fleet.net.slow:
            del self.fleet.net.slow[name]
        else:
            self.fleet.send(name, signal.SIGCONT)

    # -- readings

    async def _idle(self) -> None:
        self._idling = True
        await asyncio.sleep(SETTLE_S)
        logged, began = self._log_bytes(), self._now()
        first = await self._read_all()
        await asyncio.sleep(self._idle_s)
        last = await self._read_all()
        self.idle_periods.append(IdlePeriod(self._now() - began, first, last, self._log_bytes() - logged))
        self._idling = False

    def _log_bytes(self) -> int:
        return sum(self.fleet.log(n).stat().st_size for n in (HUB, *self.fleet.names))

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(READ_S)
            if not self._idling:
                await self._read_all()

    async def _read_all(self) -> dict[str, Reading]:
        names = [HUB, *self.fleet.names]
        found = await asyncio.gather(*map(self._read, names))
        return {name: reading for name, reading in zip(names, found, strict=True) if reading is not None}

    async def _read(self, name: str) -> Reading | None:
        pid, reading = self.fleet.pid(name), await process_stats.reading(self.fleet, name, self._now())
        if pid is not None and reading is not None:
            self.histories.setdefault(pid, ProcessHistory(name, pid)).readings.append(reading)
        return reading
