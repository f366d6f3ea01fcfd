from __future__ import annotations

from staging_peer import Peer, Shadow, V, delta

from p2pcast.ground.errors import RetryableError


async def test_versions_are_staged_one_after_the_other(monkeypatch):
    async with Peer(monkeypatch) as peer:
        peer.add(delta(None, 1), delta(1, 2), delta(2, 3))
        await peer.staged(3)
        assert peer.engines.named("on_staged") == [V[1], V[2], V[3]]
        assert [v for v, _ in peer.repair.completed] == [V[1], V[2], V[3]]
        assert peer.remembered == [V[1], V[2], V[3]]
        assert peer.timeline.names == ["staged"] * 3


async def test_a_held_shadow_is_said_to_be_held(monkeypatch):
    peer = Peer(monkeypatch, kept=Shadow(1))
    peer.orders.hold = V[1]
    async with peer:
        await peer.staged(1)
        await peer.until(lambda: peer.activity.state == "held")


async def test_a_retryable_error_changes_nothing(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        peer.staging.faults[V[2]] = RetryableError("aborted")
        peer.add(delta(1, 2))
        await peer.staged(2)
        assert peer.refused == []
