from __future__ import annotations

from staging_peer import Peer, Shadow, V, delta

from p2pcast.ground.errors import IntegrityError, RetryableError


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


async def test_a_refused_version_is_tried_again_and_fetched_anew(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(1)) as peer:
        await peer.staged(1)
        holding = delta(1, 2)
        peer.staging.faults[V[2]] = IntegrityError("cell 3 does not match")
        peer.add(holding)
        await peer.until(lambda: peer.removal.discarded)
        assert peer.removal.discarded == [(holding.id, False)]
        assert peer.refused == [(V[2], "cell 3 does not match")]
        await peer.staged(2)
        await peer.until(lambda: peer.activity.error is None)


async def test_a_refused_version_may_show_a_corrupt_shadow(monkeypatch):
    kept = Shadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        kept.corrupt = ["cell"]
        peer.staging.faults[V[2]] = IntegrityError("it does not fit")
        peer.add(delta(1, 2))
        await peer.staged(2)
        assert peer.repair.repaired == [["cell"]]
        assert peer.removal.discarded == []


async def test_where_sound_cells_do_not_fit_twice_the_digests_are_wrong(monkeypatch):
    kept = Shadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        holding = delta(1, 2)

        def refuse_again(ident) -> None:
            if len(peer.removal.discarded) < 2:
                peer.staging.faults[V[2]] = IntegrityError("it does not fit")

        peer.removal.on_discard = refuse_again
        refuse_again(b"")
        peer.add(holding)
        await peer.until(lambda: kept.closed)
        assert peer.state.staged is None
