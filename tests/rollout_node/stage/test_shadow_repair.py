from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from fake_holding import FakeHolding, FakeMirror, FakeNode, artifact, entry
from recorder import Recorder, blocking

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.errors import IntegrityError, RetryableError
from p2pcast.relay.artifact_path import Edge
from p2pcast.version import Version
from p2pcast.wakeup import Wakeup
from rollout_node.stage import shadow_repair as module
from rollout_node.stage.shadow_repair import ShadowRepair

LAYOUT = Layout([Tensor("w", "BF16", (4, 1024))], cell_words=1024)
CELLS = list(LAYOUT.cells)
V = [Version(0, n) for n in range(9)]


class Downloader(Recorder):
    """``brings``: artifacts that come when they are asked for, by id."""

    def __init__(self, node) -> None:
        super().__init__(ended=Wakeup(), sourceless_parts=[], wishes=set(), brings={}, node=node)

    def fetch_part(self, ident, excerpt, *, anchor) -> None:
        self.calls.append(("fetch_part", (ident, excerpt), {"anchor": anchor}))
        if ident in self.brings:
            self.node.holdings[ident] = self.brings[ident]
        elif ident in self.sourceless_parts:
            self.wishes.add(ident)

    def fetches(self, ident) -> bool:
        return ident in self.wishes

    def drop(self, ident) -> None:
        self.calls.append(("drop", (ident,), {}))
        self.wishes.discard(ident)


class Peer:
    """``heals``: for each call of ``restore_cells``, the cells that stay corrupt."""

    def __init__(self, monkeypatch, *holdings, listed=(), mirror=None, hub=True, base=None) -> None:
        monkeypatch.setattr(module, "PAUSE_S", 1e-6)
        monkeypatch.setattr(module, "CHECK_S", 1e-6)
        monkeypatch.setattr(module, "_holds", lambda holding, excerpt: getattr(holding, "here", True))
        monkeypatch.setattr(module, "restore_cells", self._heal)
        monkeypatch.setattr(module, "reader_of_path", lambda edges, holdings, base: (edges, base))
        monkeypatch.setattr(module, "expected_bytes", lambda e, cells, layout: 10)
        monkeypatch.setattr(module, "_check", self._check)
        monkeypatch.setattr(module, "_contents", self._contents)
        monkeypatch.setattr(module, "_manifest", lambda holding: f"manifest {holding.open.version}")
        self.node = FakeNode(*holdings)
        self.store, self.timeline, self.activity = Recorder(), Recorder(), Recorder()
        self.store.answers = {"manifest": "known", "missing_files": []}
        edges = [Edge(artifact(b, v), None if b is None else V[b], V[v], 10) for b, v in listed]
        self.planner = Recorder(
            listed=lambda: edges, layout_of=lambda ident: LAYOUT.layout_id, whole=lambda: [(V[0], ())]
        )
        self.downloader, self.disposal = Downloader(self.node), Disposal(self.node)
        self.mirror = mirror
        self.heals, self.healed, self.damaged, self.contents = [], [], set(), {}
        self.repair = ShadowRepair(
            node=self.node,
            store=self.store,
            planner=self.planner,
            base=base,
            downloader=self.downloader,
            mirror=mirror,
            hub=SimpleNamespace(connected=True) if hub else None,
            disposal=self.disposal,
            timeline=self.timeline,
            activity=self.activity,
            blocking=blocking,
        )

    def _heal(self, shadow, cells, way):
        self.healed.append(way[0])
        stay = self.heals.pop(0) if self.heals else []
        return [(cell, "it does not match") for cell in stay]

    def _check(self, holding, excerpt) -> None:
        if holding.id in self.damaged:
            raise IntegrityError("damaged")

    def _contents(self, holding, wanted):
        if holding.id in self.damaged:
            raise IntegrityError("damaged")
        return self.contents.get(holding.id, {})

    async def repair_cells(self, version=2, cells=CELLS[:2]) -> bool:
        shadow = SimpleNamespace(version=V[version], layout=LAYOUT)
        return await self.repair.repair_cells(shadow, cells, contextlib.nullcontext)


class Disposal:
    def __init__(self, node) -> None:
        self.node, self.ended, self.discarded = node, [], []

    async def end_excerpt(self, holding) -> None:
        self.ended.append(holding.id)

    async def discard(self, ident, *, contradicted=False) -> None:
        self.discarded.append(ident)
        self.node.holdings.pop(ident)


def here(base, version) -> FakeHolding:
    return FakeHolding(base, version, complete=True, confirmed=True)


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
    assert peer.disposal.ended == [part.id]


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
    assert peer.disposal.discarded == [artifact(None, 2)]
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


async def test_parts_that_do_not_come_are_asked_for_a_few_times(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    assert not await peer.repair_cells()
    assert len(peer.downloader.named("fetch_part")) == module.TRIES


@pytest.mark.parametrize("connected", [True, False])
async def test_parts_without_a_source_are_dropped_while_the_hub_is_there(monkeypatch, connected):
    peer = Peer(monkeypatch)
    peer.repair._hub.connected = connected
    await peer.repair._fetch_elsewhere(b"part", "excerpt")
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
    assert fetched == [artifact(None, 2)] * module.TRIES
    assert peer.downloader.named("drop") == fetched


async def test_without_a_hub_parts_come_from_the_mirror_at_once(monkeypatch):
    class Mirror(FakeMirror):
        async def fetch_part(self, ident, excerpt) -> None:
            peer.node.holdings[ident] = FakeHolding(None, 2, excerpt=True)

    peer = Peer(monkeypatch, listed=[(None, 2)], mirror=Mirror(), hub=False)
    assert await peer.repair_cells()
    assert peer.downloader.named("announce_part") == [artifact(None, 2)]
    assert peer.downloader.named("fetch_part") == []


# -- small files

FILE = SimpleNamespace(hash=b"f", path="config.json")


def missing_files(peer, *answers) -> None:
    """Set the results of the store's ``missing_files``, call by call; the last result repeats."""
    left = list(answers)
    peer.store.missing_files = lambda version, deep=False: left.pop(0) if len(left) > 1 else left[0]


async def test_a_version_with_all_its_files_asks_for_none(monkeypatch):
    peer = Peer(monkeypatch, here(None, 2))
    await peer.repair.complete(V[2], LAYOUT)
    assert peer.downloader.named("fetch_part") == []
    assert peer.store.named("keep_files") == []


async def test_files_come_from_the_artifacts_on_disk(monkeypatch):
    peer = Peer(monkeypatch, here(None, 1), here(1, 2))
    missing_files(peer, [FILE], [FILE], [])
    peer.contents = {artifact(1, 2): {"config.json": b"{}"}}
    await peer.repair.complete(V[2], LAYOUT)
    assert peer.store.named("keep_files") == [{"config.json": b"{}"}]


async def test_files_missing_on_disk_are_fetched(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    peer.downloader.brings[artifact(None, 2)] = FakeHolding(None, 2, excerpt=True)
    missing_files(peer, [FILE], [FILE], [])
    await peer.repair.complete(V[2], LAYOUT)
    ((_, excerpt),) = peer.downloader.named("fetch_part")
    assert excerpt.files == {b"f"}
    assert peer.disposal.ended == [artifact(None, 2)]


async def test_an_unknown_manifest_is_fetched_first(monkeypatch):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    peer.downloader.brings[artifact(None, 2)] = FakeHolding(None, 2, excerpt=True)
    known = []
    peer.store.manifest = lambda version: known[-1] if known else None
    peer.store.note = known.append
    await peer.repair.complete(V[2], LAYOUT)
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
    await peer.repair.complete(V[2], LAYOUT)
    assert known == ["manifest 0.2"]
    assert peer.downloader.named("fetch_part") == []
    assert peer.store.named("keep_files") == [{"config.json": b"{}"}]


async def test_files_that_no_node_has_are_left_out_and_asked_for_once(monkeypatch, caplog):
    peer = Peer(monkeypatch, here(None, 2))
    missing_files(peer, [FILE])
    await peer.repair.complete(V[2], LAYOUT)
    assert caplog.text.count("goes without small files: config.json") == 1
    await peer.repair.complete(V[2], LAYOUT)
    assert caplog.text.count("goes without small files") == 1


async def test_a_version_of_which_no_node_knows_the_files_goes_without(monkeypatch, caplog):
    peer = Peer(monkeypatch, listed=[(None, 2)])
    peer.store.answers["manifest"] = None
    await peer.repair.complete(V[2], LAYOUT)
    assert "no node says which small files version 0.2 has" in caplog.text
    assert len(peer.downloader.named("fetch_part")) == module.TRIES


async def test_a_damaged_artifact_gives_no_files_and_is_discarded(monkeypatch):
    peer = Peer(monkeypatch, here(None, 2))
    peer.damaged = {artifact(None, 2)}
    missing_files(peer, [FILE])
    await peer.repair.complete(V[2], LAYOUT)
    assert peer.disposal.discarded == [artifact(None, 2)]
