from __future__ import annotations

import pytest
from staging_peer import Peer, Shadow, V

from p2pcast.ground.errors import IntegrityError


async def test_a_correct_shadow_of_an_earlier_process_is_reused(monkeypatch):
    async with Peer(monkeypatch, kept=Shadow(2)) as peer:
        await peer.staged(2)
        assert peer.planner.begun.is_set()
        assert peer.repair.completed == [(V[2], True)]
        assert peer.remembered == [V[2]]
        await peer.until(lambda: peer.activity.state == "current")


async def test_a_shadow_that_no_signed_digest_matches_is_not_used(monkeypatch):
    kept = Shadow(2, digest=99)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.planner.begun.wait()
        assert kept.closed
        assert peer.state.staged is None
        await peer.until(lambda: peer.activity.state == "waiting")


@pytest.mark.parametrize("able", [True, False])
async def test_a_corrupt_shadow_is_repaired_or_not_used(monkeypatch, able):
    kept = Shadow(2)
    kept.corrupt = ["cell"]
    peer = Peer(monkeypatch, kept=kept)
    peer.repair.able = able
    async with peer:
        await peer.planner.begun.wait()
        assert peer.repair.repaired == [["cell"]]
        assert (peer.state.shadow is kept) is able


async def test_a_shadow_of_another_layout_is_not_used(monkeypatch):
    async with Peer(monkeypatch, kept=IntegrityError("another layout")) as peer:
        await peer.planner.begun.wait()
        assert peer.state.shadow is None
