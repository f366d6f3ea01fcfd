from __future__ import annotations

import asyncio

from fake_holding import FakeHolding
from staging_peer import Peer, Shadow, V, delta


async def test_only_durable_versions_are_applied(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        holding = FakeHolding(1, 2, complete=True)
        peer.add(holding)
        await peer.until(lambda: peer.activity.state == "receiving")
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.state.staged == V[1]
        holding.durable.set()
        await peer.staged(2)


async def test_an_aborted_version_is_left(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        gone = FakeHolding(1, 2, complete=True)
        peer.add(gone)
        await peer.until(lambda: peer.activity.state == "receiving")
        peer.path.clear()
        gone.end()
        await peer.until(lambda: peer.activity.state == "current")
        assert peer.state.staged == V[1]
        assert peer.activity.error is None


async def test_a_whole_state_is_filled_once_complete(monkeypatch):
    async with Peer(monkeypatch) as peer:
        holding = FakeHolding(None, 3)
        peer.add(holding)
        await peer.until(lambda: peer.activity.state == "receiving")
        holding.complete = holding.finished = True
        holding.durable.set()
        holding.progress.set()
        await peer.staged(3)
        before = peer.state.shadow
        peer.add(delta(None, 5))
        await peer.staged(5)
        assert before.closed


async def test_a_whole_state_that_is_aborted_is_left(monkeypatch):
    async with Peer(monkeypatch) as peer:
        holding = FakeHolding(None, 3)
        peer.add(holding)
        await peer.until(lambda: peer.activity.state == "receiving")
        peer.path.clear()
        holding.end()
        await peer.until(lambda: peer.activity.state == "waiting")
