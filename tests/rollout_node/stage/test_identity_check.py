from __future__ import annotations

from staging_peer import Peer, Shadow, V, delta


async def test_a_staged_version_that_is_not_the_runs_is_given_up(monkeypatch):
    kept = Shadow(1)
    peer = Peer(monkeypatch, kept=kept)
    peer.store.answers["identity"] = b"ours"
    async with peer:
        await peer.staged(1)
        peer.identities.contradict({V[1]: b"ours"})
        peer.identities.contradict({V[1]: b"theirs"})
        await peer.until(lambda: kept.closed)
        ((version, why),) = peer.left
        assert version == V[1]
        assert "is not the run's version 0.1" in why


async def test_a_stored_version_that_is_not_the_runs_is_discarded(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        peer.stored(2, b"ours")
        peer.removal.on_discard = lambda ident: peer.store.artifacts.pop(ident)
        peer.identities.contradict({V[2]: b"theirs"})
        await peer.until(lambda: peer.removal.discarded == [(b"stored", True)])


async def test_a_delta_from_another_state_of_the_same_number_gives_the_shadow_up(monkeypatch):
    kept = Shadow(1)
    peer = Peer(monkeypatch, kept=kept)
    peer.store.answers["identity"] = b"ours"
    async with peer:
        await peer.staged(1)
        peer.add(delta(1, 2, base_hash=b"theirs"))
        await peer.until(lambda: kept.closed)
        assert [version for version, _ in peer.left] == [V[2]]
        assert V[2] not in peer.engines.named("on_staged")
