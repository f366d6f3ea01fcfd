"""Keeps a fleet at its capacity: measures, starts workers through providers, drains and stops them.

Guarantees:

- A worker is stopped only after it has been drained.
- A worker that is starting counts as running, for at most ``START_S``.
- If a provider fails, that is logged, the provider is not used for ``HOLD_S``, and the others continue.
- A restarted operator learns its workers from its providers. A worker that its predecessor was draining continues once
  the ledger's order has lapsed, until it is released again.

Time is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2pcast.ground.errors import LocalError
from trainer_node.scheduling.provider import Provider
from trainer_node.scheduling.worker_fleet import WINDOW_S, CandidateWorker, FleetChange, FleetControl, change_for
from trainer_node.scheduling.worker_fleet_plan import WorkerOffer

START_S = 900.0
"""Longest start in seconds: of a machine, an engine, and the weights over a slow link."""
HOLD_S = 600.0

log = logging.getLogger("p2pcast.fleet")


class Workers(Protocol):
    """What the ledger knows of workers."""

    async def rates(self) -> Mapping[str, float]:
        """Rollouts per second of each worker that takes part, except silent ones."""
        ...

    async def drain(self, name: str) -> bool:
        """Give the worker no more leases. Returns whether it has none left."""
        ...

    async def admit(self, name: str) -> None:
        """Give the worker leases again, because a worker with this name is being started."""
        ...


@dataclass(frozen=True, slots=True)
class OfferSource:
    """An offer, and the provider of its workers."""

    offer: WorkerOffer
    provider: Provider


@dataclass(frozen=True, slots=True)
class FleetState:
    """``active``: workers that are running or starting, except those being drained. ``standby``: workers that could be
    started now. ``of``: each worker's source, by name.
    """

    active: tuple[CandidateWorker, ...]
    standby: tuple[CandidateWorker, ...]
    of: Mapping[str, OfferSource]

    @property
    def rollouts_per_s(self) -> float:
        return sum(one.rollouts_per_s for one in self.active)


class FleetOperator:
    """``window_s``: how long a deviation must last before the fleet changes, in seconds."""

    def __init__(self, sources: Sequence[OfferSource], workers: Workers, *, window_s: float = WINDOW_S) -> None:
        self._sources, self._workers = tuple(sources), workers
        self._control = FleetControl(window_s)
        self._draining: dict[str, OfferSource] = {}
        self._first_seen_s: dict[str, float] = {}
        self._measured: set[str] = set()
        """Workers that have taken part; if one of them is silent, it is dead and not starting."""
        self._known: dict[str, Sequence[str]] = {}
        """Each offer's workers, as the provider last reported them."""
        self._held_until_s: dict[str, float] = {}

    async def adjust(self, now_s: float, target_per_s: float) -> FleetChange:
        """Measure the fleet once, and change it after a sustained deviation. Returns the change."""
        fleet = await self.measure(now_s)
        change = self._control.decide(now_s, target_per_s, fleet.active, fleet.standby)
        for started in change.activate:
            await self._start(fleet.of[started.name], started.name, now_s)
        for released in change.release:
            log.info("worker %s is drained: the fleet's capacity is above its target", released.name)
            self._draining[released.name] = fleet.of[released.name]
        await self._stop_drained(now_s)
        return change

    async def preview(self, now_s: float, target_per_s: float) -> tuple[FleetState, FleetChange]:
        """Return the fleet, and the change that ``adjust`` would make after a sustained deviation. Changes nothing."""
        fleet = await self.measure(now_s)
        return fleet, change_for(target_per_s, fleet.active, fleet.standby)

    async def measure(self, now_s: float) -> FleetState:
        rates, alive = await self._workers.rates(), set[str]()
        active: list[CandidateWorker] = []
        standby: list[CandidateWorker] = []
        of: dict[str, OfferSource] = {}
        for source in self._sources:
            names = await self._running(source, now_s)
            others = self._others(source, names, now_s)
            active += [self._candidate(source, name, rates, now_s) for name in names if name not in self._draining]
            standby += others
            of |= dict.fromkeys([*names, *(each.name for each in others)], source)
            alive.update(names)
        self._forget(alive)
        return FleetState(tuple(active), tuple(standby), of)

    def _forget(self, alive: Collection[str]) -> None:
        """Forget workers that no provider reports any more, because a cluster gives each worker a new name."""
        for gone in self._first_seen_s.keys() - alive:
            del self._first_seen_s[gone]
            self._measured.discard(gone)
            if self._draining.pop(gone, None) is not None:
                log.info("worker %s is gone", gone)

    async def _running(self, source: OfferSource, now_s: float) -> Sequence[str]:
        kind = source.offer.kind
        if not self._held(source, now_s):
            try:
                self._known[kind] = await source.provider.running()
            except LocalError as error:
                self._hold(source, now_s, error)
        names = self._known.get(kind, ())
        for name in names:
            self._first_seen_s.setdefault(name, now_s)
        return names

    def _held(self, source: OfferSource, now_s: float) -> bool:
        return now_s < self._held_until_s.get(source.offer.kind, now_s)

    def _candidate(self, source: OfferSource, name: str, rates: Mapping[str, float], now_s: float) -> CandidateWorker:
        if name in rates:
            self._measured.add(name)
        starting = name not in self._measured and now_s - self._first_seen_s[name] < START_S
        rate = rates.get(name, source.offer.rollouts_per_s if starting else 0.0)
        return CandidateWorker(name, source.offer.usd_per_h, rate, fixed=not source.provider.changes)

    def _others(self, source: OfferSource, running: Sequence[str], now_s: float) -> list[CandidateWorker]:
        """The workers that the source could start now."""
        if not source.provider.changes or self._held(source, now_s):
            return []
        free = [each for each in source.offer.candidates() if each.name not in running]
        return free[: max(0, source.offer.count - len(running))]

    async def _start(self, source: OfferSource, name: str, now_s: float) -> None:
        if self._held(source, now_s):  # because another of its workers failed to start
            return
        log.info("worker %s is started: the fleet's capacity is below its target", name)
        self._measured.discard(name)
        await self._workers.admit(name)
        try:
            await source.provider.start(name)
        except LocalError as error:
            self._hold(source, now_s, error)
        else:
            self._first_seen_s[name] = now_s

    async def _stop_drained(self, now_s: float) -> None:
        for name, source in list(self._draining.items()):
            if not await self._workers.drain(name) or self._held(source, now_s):
                continue
            try:
                await source.provider.stop(name)
            except LocalError as error:
                self._hold(source, now_s, error)
            else:
                log.info("worker %s is stopped", name)
                del self._draining[name]

    def _hold(self, source: OfferSource, now_s: float, error: LocalError) -> None:
        log.warning("no changes by the provider of %s for %g s: %s", source.offer.kind, HOLD_S, error)
        self._held_until_s[source.offer.kind] = now_s + HOLD_S
