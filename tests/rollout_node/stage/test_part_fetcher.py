"""Sources of parts, and their end."""

from __future__ import annotations

import pytest
from fake_holding import FakeHolding, FakeMirror, artifact, entry
from repairing_peer import Peer

from p2pcast.ground.errors import RetryableError
from rollout_node.stage.shadow_repair import TRIES


async def test_parts_that_do_not_come_are_asked_for_a_few_times(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    assert not await peer.repair_cells()
    assert len(peer.downloader.named("fetch_part")) == TRIES


@pytest.mark.parametrize("connected", [True, False])
async def test_parts_without_a_source_are_dropped_while_the_hub_is_there(monkeypatch, connected):
    peer = Peer(monkeypatch)
    peer.hub.connected = connected
    await peer.parts._fetch_elsewhere(b"part", "excerpt")
    assert peer.downloader.named("drop") == [b"part"] * connected


async def test_parts_without_a_source_come_from_a_mirror_in_use(monkeypatch):
    class Mirror(FakeMirror):
        async def fetch_part(self, ident, excerpt) -> None:
            fetched.append(ident)
            raise RetryableError("no answer")

    fetched = []
    peer = Peer(monkeypatch, listed=[(None, 2)], mirror=Mirror(a=entry(None, 2)))
    peer.downloader.sourceless_parts.append(artifact(None, 2))
    assert not await peer.repair_cells()
    assert fetched == [artifact(None, 2)] * TRIES
    assert peer.downloader.named("drop") == fetched


async def test_without_a_hub_parts_come_from_the_mirror_at_once(monkeypatch):
    class Mirror(FakeMirror):
        async def fetch_part(self, ident, excerpt) -> None:
            peer.node.holdings[ident] = FakeHolding(None, 2, excerpt=True)

    peer = Peer(monkeypatch, listed=[(None, 2)], mirror=Mirror(), hub=False)
    assert await peer.repair_cells()
    assert peer.downloader.named("announce_part") == [artifact(None, 2)]
    assert peer.downloader.named("fetch_part") == []
