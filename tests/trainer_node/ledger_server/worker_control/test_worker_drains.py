"""Orders of the hub about workers: followed by the ledger as often as they are repeated, and told of once."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.process.events import Events
from trainer_node.ledger_server.worker_control.worker_drains import WorkerDrains


class Ledger:
    def __init__(self) -> None:
        self.drained: set[str] = set()
        self.error: Exception | None = None
        self.freed = 0
        self.events = Events()
        self.drains = WorkerDrains(self.drain, self.events, self.changed)

    async def drain(self, name: str, for_s: float) -> tuple[int, bool]:
        if self.error is not None:
            raise self.error
        changed = (name in self.drained) != (for_s > 0)
        self.drained = self.drained | {name} if for_s else self.drained - {name}
        return 3, changed

    def changed(self) -> None:
        self.freed += 1

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.kind, dict(event.facts)) for event in self.events.after(0)[1]]


async def test_an_order_that_is_repeated_is_one_event() -> None:
    ledger = Ledger()
    for left_s in (600.0, 599.0):
        await ledger.drains.take({"w": left_s})
    for _ in range(2):
        await ledger.drains.take({"w": 0.0})
    assert ledger.told() == [
        ("worker_drained", {"name": "w", "leases": 3, "for_s": 600.0}),
        ("worker_admitted", {"name": "w"}),
    ]
    assert ledger.freed == 1


@pytest.mark.parametrize("orders", [None, [], "w", {"w": None}, {"w": True}, {"w": float("nan")}, {"w": "60"}])
async def test_orders_of_another_form_do_nothing(orders: Any) -> None:
    ledger = Ledger()
    await ledger.drains.take(orders)
    assert ledger.told() == []


async def test_an_order_that_is_refused_stops_no_other_order() -> None:
    ledger = Ledger()
    ledger.error = UsageError("too long")
    await ledger.drains.take({"w": 60.0})
    ledger.error = LocalError("the database is away")
    with pytest.raises(LocalError):
        await ledger.drains.take({"w": 60.0})
