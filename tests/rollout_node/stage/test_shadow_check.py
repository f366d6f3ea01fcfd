from __future__ import annotations

import asyncio

from staging_peer import Peer, Shadow, delta


async def test_a_suspected_shadow_is_read_once_in_a_while(monkeypatch):
    kept = Shadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        kept.corrupt = ["cell"]
        peer.check.suspect()
        await peer.until(lambda: peer.repair.repaired == [["cell"]])
        kept.corrupt = ["another"]
        peer.check.suspect()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(peer.repair.repaired) == 1


async def test_a_shadow_that_cannot_be_repaired_is_made_anew(monkeypatch):
    kept = Shadow(1)
    peer = Peer(monkeypatch, kept=kept)
    peer.repair.able = False
    async with peer:
        await peer.staged(1)
        kept.corrupt = ["cell"]
        peer.check.suspect()
        await peer.until(lambda: kept.closed)
        peer.add(delta(None, 5))
        await peer.staged(5)
