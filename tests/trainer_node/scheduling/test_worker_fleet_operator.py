"""The fleet's operator with providers and a ledger in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from p2pcast.ground.errors import LocalError
from trainer_node.scheduling.provider import StaticProvider
from trainer_node.scheduling.worker_fleet import MEASUREMENTS, NO_CHANGE, WINDOW_S
from trainer_node.scheduling.worker_fleet_operator import HOLD_S, START_S, FleetOperator, OfferSource
from trainer_node.scheduling.worker_fleet_plan import WorkerOffer


class Machines:
    changes = True

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.stopped: list[str] = []
        self.tried: list[str] = []
        self.broken = False

    async def running(self) -> list[str]:
        if self.broken:
            raise LocalError("the cloud is away")
        return list(self.names)

    async def start(self, name: str) -> None:
        self.tried.append(name)
        if self.broken:
            raise LocalError("the cloud is away")
        self.names.append(name)

    async def stop(self, name: str) -> None:
        self.names.remove(name)
        self.stopped.append(name)


class Ledger:
    def __init__(self, **rates: float) -> None:
        self.now: dict[str, float] = rates
        self.asked: list[str] = []
        self.admitted: list[str] = []
        self.empty = False

    async def rates(self) -> Mapping[str, float]:
        return self.now

    async def drain(self, name: str) -> bool:
        self.asked.append(name)
        return self.empty

    async def admit(self, name: str) -> None:
        self.admitted.append(name)


class Fleet:
    """An operator that looks every ``WINDOW_S`` / 2."""

    def __init__(self, ledger: Ledger, *sources: OfferSource) -> None:
        self.operator, self.now_s = FleetOperator(sources, ledger), 0.0

    async def measure_repeatedly(self, target_per_s: float, count: int = MEASUREMENTS) -> list[Any]:
        made = []
        for _ in range(count):
            made.append(await self.operator.adjust(self.now_s, target_per_s))
            self.now_s += WINDOW_S / 2
        return made


def offer(kind: str = "gpu", usd: float = 1.0, count: int = 4) -> WorkerOffer:
    return WorkerOffer(kind, usd, 10.0, count)


async def test_a_shortfall_starts_one_worker_that_counts_during_its_start():
    machines, ledger = Machines("gpu-0"), Ledger(**{"gpu-0": 10.0})
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    await fleet.measure_repeatedly(15.0)
    assert machines.names == ["gpu-0", "gpu-1"]
    assert ledger.admitted == ["gpu-1"], "a worker of this name may have been drained"
    assert await fleet.measure_repeatedly(15.0, 5 * MEASUREMENTS) == [NO_CHANGE] * 5 * MEASUREMENTS
    fleet.now_s += START_S
    await fleet.measure_repeatedly(15.0)
    assert machines.names == ["gpu-0", "gpu-1", "gpu-2"], "a worker that never took part was not replaced"


async def test_a_silent_worker_is_replaced():
    machines, ledger = Machines("gpu-0", "gpu-1"), Ledger(**{"gpu-0": 10.0, "gpu-1": 10.0})
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    assert await fleet.measure_repeatedly(20.0) == [NO_CHANGE] * MEASUREMENTS
    del ledger.now["gpu-1"]
    await fleet.measure_repeatedly(20.0)
    assert machines.names == ["gpu-0", "gpu-1", "gpu-2"]


async def test_a_worker_is_stopped_only_when_drained():
    machines = Machines("gpu-0", "gpu-1", "gpu-2")
    ledger = Ledger(**dict.fromkeys(machines.names, 10.0))
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    await fleet.measure_repeatedly(10.0)
    assert ledger.asked
    assert machines.stopped == []
    ledger.empty = True
    await fleet.measure_repeatedly(10.0, 1)
    assert machines.stopped == ["gpu-2", "gpu-1"]
    assert machines.names == ["gpu-0"]


async def test_workers_started_by_hand_are_measured_and_left_alone():
    ledger = Ledger(one=10.0, two=10.0)
    machines = Machines()
    fleet = Fleet(
        ledger, OfferSource(offer("own", 5.0, 2), StaticProvider(["one", "two"])), OfferSource(offer(), machines)
    )
    await fleet.measure_repeatedly(5.0)
    assert ledger.asked == []
    await fleet.measure_repeatedly(25.0)
    assert machines.names == ["gpu-0"]


async def test_a_dear_worker_started_by_hand_does_not_keep_others_running():
    ledger, machines = Ledger(own=10.0, **{"gpu-0": 10.0}), Machines("gpu-0")
    ledger.empty = True
    fleet = Fleet(ledger, OfferSource(offer("hand", 5.0, 1), StaticProvider(["own"])), OfferSource(offer(), machines))
    [*_, change] = await fleet.measure_repeatedly(10.0)
    assert machines.stopped == ["gpu-0"]
    assert [one.name for one in change.release] == ["gpu-0"]


async def test_a_provider_that_fails_is_not_asked_for_another_start():
    machines, ledger = Machines(), Ledger()
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    await fleet.measure_repeatedly(30.0, 1)
    machines.broken = True
    fleet.operator._known["gpu"] = ()
    machines.running = _nothing  # the list is answered, starts fail
    await fleet.measure_repeatedly(30.0, 2)
    assert machines.tried == ["gpu-0"]
    await fleet.measure_repeatedly(30.0, 5)
    assert machines.tried == ["gpu-0"]


async def test_a_drained_worker_that_ends_by_itself_is_not_stopped():
    machines = Machines("gpu-0", "gpu-1")
    ledger = Ledger(**dict.fromkeys(machines.names, 10.0))
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    await fleet.measure_repeatedly(10.0)
    assert ledger.asked == ["gpu-1"]
    machines.names.remove("gpu-1")
    ledger.empty = True
    await fleet.measure_repeatedly(10.0, 2)
    assert machines.stopped == []
    assert ledger.asked == ["gpu-1"]


async def test_a_name_that_comes_back_is_a_starting_worker():
    machines, ledger = Machines("gpu-0", "gpu-1"), Ledger(**{"gpu-0": 10.0, "gpu-1": 10.0})
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    await fleet.measure_repeatedly(20.0, 1)
    machines.names, ledger.now = ["gpu-0"], {"gpu-0": 10.0}
    await fleet.measure_repeatedly(20.0, 1)
    machines.names.append("gpu-1")
    assert await fleet.measure_repeatedly(20.0, MEASUREMENTS) == [NO_CHANGE] * MEASUREMENTS
    assert machines.names == ["gpu-0", "gpu-1"]


async def test_a_preview_says_the_change_and_makes_none():
    machines = Machines("gpu-0", "gpu-1", "gpu-2")
    ledger = Ledger(**dict.fromkeys(machines.names, 10.0))
    fleet = Fleet(ledger, OfferSource(offer(), machines))
    found, change = await fleet.operator.preview(0.0, 10.0)
    assert found.rollouts_per_s == 30.0
    assert [one.name for one in change.release] == ["gpu-2", "gpu-1"]
    _, change = await fleet.operator.preview(1.0, 35.0)
    assert [one.name for one in change.activate] == ["gpu-3"]
    assert (machines.tried, machines.stopped, ledger.asked, ledger.admitted) == ([], [], [], [])


async def _nothing() -> list[str]:
    return []


async def test_a_broken_provider_is_left_out_while_the_next_one_starts_workers(caplog):
    cheap, dear, ledger = Machines("cheap-0"), Machines(), Ledger(**{"cheap-0": 10.0})
    fleet = Fleet(ledger, OfferSource(offer("cheap"), cheap), OfferSource(offer("dear", 9.0), dear))
    await fleet.measure_repeatedly(15.0, 1)
    cheap.broken = True
    await fleet.measure_repeatedly(15.0)
    assert dear.names == ["dear-0"], "the known worker of the broken provider still counts, so one is enough"
    assert "the cloud is away" in caplog.text
    ledger.now = {"cheap-0": 10.0, "dear-0": 10.0}
    cheap.broken = False
    fleet.now_s += HOLD_S
    await fleet.measure_repeatedly(25.0)
    assert cheap.names == ["cheap-0", "cheap-1"]
