"""A peer that repairs cells and small files, without bytes and a network."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from fake_holding import FakeHolding, FakeNode, artifact
from recorder import Recorder, blocking

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.artifact_path import Edge
from rollout_node.stage import part_fetcher, shadow_repair, small_file_repair
from rollout_node.stage.part_fetcher import PartFetcher
from rollout_node.stage.shadow_repair import ShadowRepair
from rollout_node.stage.small_file_repair import SmallFileRepair

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
        monkeypatch.setattr(small_file_repair, "PAUSE_S", 1e-6)
        monkeypatch.setattr(part_fetcher, "CHECK_S", 1e-6)
        monkeypatch.setattr(part_fetcher, "holds", lambda holding, excerpt: getattr(holding, "here", True))
        monkeypatch.setattr(shadow_repair, "restore_cells", self._heal)
        monkeypatch.setattr(shadow_repair, "reader_of_path", lambda edges, holdings, base: (edges, base))
        for module in (shadow_repair, small_file_repair):
            monkeypatch.setattr(module, "expected_bytes", lambda e, cells, layout: 10)
        monkeypatch.setattr(shadow_repair, "_check", self._check)
        monkeypatch.setattr(small_file_repair, "_contents", self._contents)
        monkeypatch.setattr(small_file_repair, "_manifest", lambda holding: f"manifest {holding.open.version}")
        self.node = FakeNode(*holdings)
        self.store, self.timeline, self.activity = Recorder(), Recorder(), Recorder()
        self.store.answers = {"manifest": "known", "missing_files": []}
        edges = [Edge(artifact(b, v), None if b is None else V[b], V[v], 10) for b, v in listed]
        self.planner = Recorder(listed_of=lambda layout: edges, whole=lambda: [(V[0], ())])
        self.downloader, self.removal = Downloader(self.node), ArtifactRemoval(self.node)
        self.mirror = mirror
        self.heals, self.healed, self.damaged, self.contents = [], [], set(), {}
        self.hub = SimpleNamespace(connected=True) if hub else None
        self.parts = PartFetcher(self.node, self.downloader, mirror, self.hub, self.removal, self.activity)
        self.repair = ShadowRepair(self.planner, base, self.parts, self.removal, self.timeline, blocking)
        self.files = SmallFileRepair(self.store, self.planner, self.parts, self.removal, blocking)

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


class ArtifactRemoval:
    def __init__(self, node) -> None:
        self.node, self.ended, self.discarded = node, [], []

    async def end_excerpt(self, holding) -> None:
        self.ended.append(holding.id)

    async def discard(self, ident, *, contradicted=False) -> None:
        self.discarded.append(ident)
        self.node.holdings.pop(ident)


def here(base, version) -> FakeHolding:
    return FakeHolding(base, version, complete=True, confirmed=True)
