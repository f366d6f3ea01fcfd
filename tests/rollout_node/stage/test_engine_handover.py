from __future__ import annotations

import asyncio

import pytest
from staging_peer import Peer, Shadow, V, delta

from rollout_node.stage.engine_handover import KEPT_PATCHES


async def test_engines_are_waited_for_unless_the_next_version_is_here(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(1))
    peer.engines.answers["settled"] = False
    async with peer:
        await peer.staged(1)
        peer.add(delta(1, 2))
        await peer.staged(2)
        peer.orders.target = V[2]  # the version that engines are to switch to is not skipped
        peer.add(delta(2, 3))
        for _ in range(20):
            await asyncio.sleep(0)
        assert peer.state.staged == V[2]
        peer.engines.answers["settled"] = True
        await peer.staged(3)


@pytest.mark.parametrize(("oldest", "dropped"), [(None, 30), (5, 30 - KEPT_PATCHES), (29, 29)])
async def test_patches_that_no_engine_needs_are_dropped(monkeypatch, oldest, dropped):
    kept = Shadow(30)
    kept.patches = V[1:31]
    peer = Peer(monkeypatch, kept=kept)
    peer.engines.oldest = None if oldest is None else V[oldest]
    async with peer:
        await peer.staged(30)
        assert kept.named("drop_patches") == [V[dropped]]


async def test_an_older_version_than_before_is_not_remembered(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(2))
    peer.regression = True
    async with peer:
        await peer.staged(2)
        assert peer.remembered == []
