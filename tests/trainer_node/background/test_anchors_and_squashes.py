"""Anchors and squashes made beside live traffic, on a real store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from parts import Background, Encoder, emitted, node

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.ground.version import Version
from tests.support.until import until
from trainer_node.background.anchors_and_squashes import MAX_WAITING, AnchorsAndSquashes
from trainer_node.background.background_throttle import live_traffic

V = Version


async def _nothing(*_: Any) -> None:
    """No peer has lost artifacts."""


class Parts:
    def __init__(self, encoder: Encoder, **options: Any) -> None:
        self.encoder = encoder
        self.added: list[Any] = []
        self.made = AnchorsAndSquashes(
            encoder.store, encoder.node.holdings, encoder.key, encoder.shadow, encoder.events,
            live_traffic=lambda: False, add=self._add, recover=_nothing, catch_up=_nothing,
            make_room=encoder.make_room, **options,
        )  # fmt: skip
        self.news = asyncio.Event()

    def _add(self, stored: Any) -> None:
        self.encoder.node.add_stored(stored.assembly, self.encoder.store.open_log(stored))
        self.added.append((stored.kind, stored.base, stored.version))
        self.news.set()

    async def versions(self, count: int) -> None:
        for step in range(count):
            await self.encoder.publish(step)
        await self.encoder.background.settle()

    async def run_until_added(self, count: int) -> None:
        running = asyncio.ensure_future(self.made.run())
        async with asyncio.timeout(600):
            while len(self.added) < count:
                await self.news.wait()
                self.news.clear()
        running.cancel()
        await asyncio.wait([running])


@pytest.fixture
async def parts(encoder: Encoder):
    found: list[Parts] = []

    def make(**options: Any) -> Parts:
        found.append(Parts(encoder, **options))
        return found[-1]

    yield make
    for one in found:
        one.made.close()


async def test_an_anchor_is_made_after_so_many_versions(parts) -> None:
    found = parts(rungs=(), anchor_every=2)
    await found.versions(2)
    assert not await found.made._next()
    await found.encoder.publish(2)
    await found.encoder.background.settle()
    await found.run_until_added(1)
    assert found.added == [("anchor", None, V(0, 2))]
    [event] = emitted(found.encoder.events, "kept")
    assert (event["version"], event["base"]) == ("0.2", None)
    assert found.made.made_bytes == event["bytes"]
    assert not await found.made._next()


async def test_the_ladder_is_made_rung_by_rung(parts) -> None:
    found = parts(rungs=(2,))
    await found.versions(5)
    await found.run_until_added(2)
    assert found.added[0][0] == "delta"
    assert all(version.step - base.step == 2 for _, base, version in found.added)
    assert 0 < found.made.exponent() <= 1


async def test_a_late_peer_is_promised_a_squash_that_is_made_first(parts) -> None:
    found = parts(rungs=(4,))
    assert found.made.ask(V(0, 0)) is None, "there is no version yet"
    await found.versions(4)
    promise = found.made.ask(V(0, 1), node("a"))
    assert (promise.base, promise.version) == (V(0, 1), V(0, 3))
    assert promise.wait_s > 0
    assert found.made.ask(V(0, 1), node("b")) is promise
    await found.run_until_added(1)
    assert found.added[0] == ("delta", V(0, 1), V(0, 3))
    there = found.made.ask(V(0, 1))
    assert (there.wait_s, there.bytes) == (0.0, emitted(found.encoder.events, "kept")[0]["bytes"])


async def test_no_squash_is_promised_where_there_will_be_none(parts, monkeypatch) -> None:
    found = parts(rungs=(4,))
    await found.versions(6)
    assert found.made.ask(V(0, 4)).wait_s == 0.0, "one step is there already"
    assert found.made.ask(V(3, 3)) is None, "no path leads from there"
    monkeypatch.setattr(limits, "MAX_SQUASHES_PER_NODE", 1)
    assert found.made.ask(V(0, 0), node("a")) is not None
    assert found.made.ask(V(0, 1), node("a")) is None
    assert found.made.ask(V(0, 1), node("b")) is not None
    monkeypatch.setattr("trainer_node.background.anchors_and_squashes.MAX_WAITING", 2)
    assert found.made.ask(V(0, 2), node("c")) is None
    assert MAX_WAITING == 16
    assert parts(rungs=()).made.ask(V(0, 0)) is None


async def test_a_failure_is_logged_and_costs_its_own_work_alone(parts, monkeypatch, caplog) -> None:
    found = parts(rungs=(2,))
    await found.versions(3)

    def full(*_: object) -> None:
        raise LocalError("no space is left")

    monkeypatch.setattr("trainer_node.background.anchors_and_squashes.make_squash", full)
    running = asyncio.ensure_future(found.made.run())
    await until(lambda: "no space is left" in caplog.text)
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
    assert found.made.busy is None
    assert not await found.made._next(), "a failed rung is not tried again"


async def test_a_closed_hub_makes_no_more(parts) -> None:
    found = parts(anchor_every=1)
    await found.versions(1)
    found.made.close()
    with pytest.raises(RetryableError, match="the hub ends"):
        found.made._wait_for_turn()


async def test_nothing_is_made_without_a_shadow(parts, encoder: Encoder, background: Background) -> None:
    found = parts(rungs=(), anchor_every=1)
    await found.versions(2)
    encoder.shadow.close()
    assert not await found.made._next()
    await found.made._anchor()
    assert found.added == []


def test_traffic_is_live_while_an_artifact_is_made_or_a_child_waits() -> None:
    whole, making = SimpleNamespace(incomplete=False), SimpleNamespace(incomplete=True)
    idle, waiting = (SimpleNamespace(schedules=SimpleNamespace(waiting=n)) for n in (0, 1))
    assert not live_traffic([whole], [idle])
    assert live_traffic([whole, making], [idle])
    assert live_traffic([whole], [idle, waiting])
