"""Ways to the words of corrupt cells."""

from __future__ import annotations

from types import SimpleNamespace

from fake_holding import FakeHolding, artifact
from repairing_peer import CELLS, Peer, V, here


async def test_cells_come_from_the_artifacts_on_disk(monkeypatch):
    peer = Peer(monkeypatch, here(None, 0), here(0, 1), here(1, 2))
    assert await peer.repair_cells()
    assert [e.version for e in peer.healed[0]] == [V[0], V[1], V[2]]
    assert peer.downloader.names == ["release"]
    assert peer.timeline.named("healed") == [(V[2], 2, 0)]


async def test_pieces_missing_on_disk_are_fetched_and_released(monkeypatch):
    peer = Peer(monkeypatch, here(1, 2), listed=[(None, 1)])
    part = FakeHolding(None, 1, excerpt=True, held=3)
    peer.downloader.brings[part.id] = part
    assert await peer.repair_cells()
    ((ident, excerpt),) = peer.downloader.named("fetch_part")
    assert ident == part.id
    assert excerpt.cells == {cell.index for cell in CELLS[:2]}
    assert peer.activity.named("enter") == ["healing"]
    assert peer.timeline.named("healed") == [(V[2], 2, 300)]
    assert peer.removal.ended == [part.id]


async def test_where_no_way_leads_to_the_version_nothing_is_repaired(monkeypatch):
    peer = Peer(monkeypatch, here(1, 2))
    assert not await peer.repair_cells()
    assert peer.timeline.calls == []


async def test_the_base_folder_is_where_a_way_may_begin(monkeypatch):
    checkpoint = SimpleNamespace(words="words")
    base = SimpleNamespace(version_among=lambda whole: V[1], checkpoint=checkpoint)
    peer = Peer(monkeypatch, here(1, 2), base=base)
    assert await peer.repair_cells()


async def test_a_damaged_artifact_is_discarded_and_another_way_tried(monkeypatch):
    peer = Peer(monkeypatch, here(None, 2), here(None, 1), here(1, 2))
    peer.heals, peer.damaged = [CELLS[:1]], {artifact(None, 2)}
    assert await peer.repair_cells()
    assert peer.removal.discarded == [artifact(None, 2)]
    assert [e.version for e in peer.healed[1]] == [V[1], V[2]]


async def test_where_every_artifact_is_sound_the_digests_are_wrong(monkeypatch):
    peer = Peer(monkeypatch, here(None, 2))
    peer.heals = [CELLS[:1]]
    assert not await peer.repair_cells()
    assert peer.timeline.named("healed") == [(V[2], 1, 0)]


async def test_a_new_state_may_be_less_to_fetch(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 1), (1, 2), (2, 3), (None, 3)])
    assert not await peer.repair_cells()
    assert peer.downloader.named("fetch_part") == []
