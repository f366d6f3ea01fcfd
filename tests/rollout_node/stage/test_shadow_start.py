from __future__ import annotations

from staging_peer import Peer, Shadow, V


async def test_a_correct_shadow_waits_for_the_hubs_list(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(2), resumed=True, listed=False)
    peer.store.answers["newest"] = V[1]
    peer.planner.states = lambda: {V[2]: 2} if peer.catalog.complete.is_set() else {}
    async with peer:
        await peer.until(lambda: peer.activity.state == "waiting")
        assert not peer.planner.begun.is_set()
        peer.catalog.complete.set()
        await peer.staged(2)


async def test_a_start_without_the_hub_and_without_versions_waits_for_the_hub(monkeypatch):
    async with Peer(monkeypatch, resumed=True, listed=False) as peer:
        await peer.until(lambda: peer.activity.state == "waiting")
        assert not peer.planner.begun.is_set()
