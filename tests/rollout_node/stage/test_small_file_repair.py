"""Small files of a version, from disk and from other nodes."""

from __future__ import annotations

from types import SimpleNamespace

from fake_holding import FakeHolding, artifact
from repairing_peer import LAYOUT, Peer, V, here

from p2pcast.sparse import budget_schedule
from rollout_node.stage.small_file_repair import TRIES

FILE = SimpleNamespace(hash=b"f", path="config.json")


def missing_files(peer, *answers) -> None:
    """Set the results of the store's ``missing_files``, call by call; the last result repeats."""
    left = list(answers)
    peer.store.missing_files = lambda version, deep=False: left.pop(0) if len(left) > 1 else left[0]


async def test_a_version_with_all_its_files_asks_for_none(monkeypatch):
    peer = Peer(monkeypatch, here(None, 2))
    await peer.files.complete(V[2], LAYOUT)
    assert peer.downloader.named("fetch_part") == []
    assert peer.store.named("keep_files") == []


async def test_files_come_from_the_artifacts_on_disk(monkeypatch):
    peer = Peer(monkeypatch, here(None, 1), here(1, 2))
    missing_files(peer, [FILE], [FILE], [])
    peer.contents = {artifact(1, 2): {"config.json": b"{}"}}
    await peer.files.complete(V[2], LAYOUT)
    assert peer.store.named("keep_files") == [{"config.json": b"{}"}]


async def test_files_missing_on_disk_are_fetched(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    peer.downloader.brings[artifact(None, 2)] = FakeHolding(None, 2, excerpt=True)
    missing_files(peer, [FILE], [FILE], [])
    await peer.files.complete(V[2], LAYOUT)
    ((_, excerpt),) = peer.downloader.named("fetch_part")
    assert excerpt.files == {b"f"}
    assert peer.removal.ended == [artifact(None, 2)]


async def test_an_unknown_manifest_is_fetched_first(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    peer.downloader.brings[artifact(None, 2)] = FakeHolding(None, 2, excerpt=True)
    known = []
    peer.store.manifest = lambda version: known[-1] if known else None
    peer.store.note = known.append
    await peer.files.complete(V[2], LAYOUT)
    assert known == ["manifest 0.2"]


async def test_an_artifact_that_comes_as_a_whole_meanwhile_is_read(monkeypatch):
    """The parent has pushed the artifact since the way was chosen."""
    peer = Peer(monkeypatch, listed=[(None, 2)])
    known = []

    def manifest(version):
        if peer.downloader.named("release") == []:
            peer.node.holdings[artifact(None, 2)] = here(None, 2)
        return known[-1] if known else None

    peer.store.manifest, peer.store.note = manifest, known.append
    missing_files(peer, [FILE], [])
    peer.contents = {artifact(None, 2): {"config.json": b"{}"}}
    await peer.files.complete(V[2], LAYOUT)
    assert known == ["manifest 0.2"]
    assert peer.downloader.named("fetch_part") == []
    assert peer.store.named("keep_files") == [{"config.json": b"{}"}]


async def test_files_that_no_node_has_are_left_out_and_asked_for_once(monkeypatch, caplog):
    peer = Peer(monkeypatch, here(None, 2))
    missing_files(peer, [FILE])
    await peer.files.complete(V[2], LAYOUT)
    assert caplog.text.count("goes without small files: config.json") == 1
    await peer.files.complete(V[2], LAYOUT)
    assert caplog.text.count("goes without small files") == 1


async def test_schedule_that_did_not_come_is_asked_for_with_the_next_version(monkeypatch, caplog):
    """Engines install no version before its schedule is there."""
    peer = Peer(monkeypatch, here(None, 1), here(1, 2))
    schedule = SimpleNamespace(hash=b"s", path=budget_schedule.FILE)
    missing_files(peer, [schedule])
    await peer.files.complete(V[1], LAYOUT)
    assert "goes without small files: sparse_attention.json" in caplog.text
    missing_files(peer, [schedule], [schedule], [])
    peer.contents = {artifact(1, 2): {budget_schedule.FILE: b"{}"}}
    await peer.files.complete(V[2], LAYOUT)
    assert {budget_schedule.FILE: b"{}"} in peer.store.named("keep_files")


async def test_a_version_of_which_no_node_knows_the_files_goes_without(monkeypatch, caplog):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    peer.store.answers["manifest"] = None
    await peer.files.complete(V[2], LAYOUT)
    assert "no node says which small files version 0.2 has" in caplog.text
    assert len(peer.downloader.named("fetch_part")) == TRIES


async def test_a_damaged_artifact_gives_no_files_and_is_discarded(monkeypatch):
    peer = Peer(monkeypatch, here(None, 2))
    peer.damaged = {artifact(None, 2)}
    missing_files(peer, [FILE])
    await peer.files.complete(V[2], LAYOUT)
    assert peer.removal.discarded == [artifact(None, 2)]
