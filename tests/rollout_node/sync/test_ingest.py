from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fake_holding import FakeCatalog, FakeHolding, FakeNode, FakeParent, artifact, entry
from recorder import Background, Recorder, blocking

from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from rollout_node.sync.ingest import Ingest, NodeEvents


class Peer:
    def __init__(self, *entries) -> None:
        self.node = FakeNode()
        self.node.error = asyncio.get_running_loop().create_future()
        self.store, self.freshness, self.missing, self.timeline, self.planner, self.removal = (
            Recorder() for _ in range(6)
        )
        self.store.answers = {"seal": SimpleNamespace(id=artifact(0, 1)), "retain": []}
        self.planner.answers["needed"] = frozenset([b"needed"])
        self.transfers, self.hub, self.background = [], SimpleNamespace(connected=True), Background()
        self.ingest = Ingest(
            node=self.node,
            store=self.store,
            freshness=self.freshness,
            missing_versions=self.missing,
            timeline=self.timeline,
            planner=self.planner,
            catalog=FakeCatalog(*entries),
            removal=self.removal,
            on_transfer=lambda size, took_s: self.transfers.append((size, took_s)),
            hub=self.hub,
            blocking=blocking,
            background=self.background,
        )


async def test_an_excerpts_log_is_not_resumable():
    store, record = Recorder(), SimpleNamespace(artifact=b"a")
    events = NodeEvents(store)
    events.make_log(record, "layout", excerpt=False)
    events.make_log(record, "layout", excerpt=True)
    assert store.calls == [
        ("begin", (record, "layout"), {"resumable": True}),
        ("begin_excerpt", (record,), {}),
    ]


async def test_observers_get_every_event_of_the_node():
    events, observer = NodeEvents(Recorder()), Recorder()
    events.on_opened("before the first observer")
    events.observers.append(observer)
    events.on_opened(1)
    events.on_complete(2)
    events.on_aborted(3)
    events.on_offered(4)
    events.on_upstream_lost(5, None)
    assert observer.calls == [
        ("on_opened", (1,), {}),
        ("on_complete", (2,), {}),
        ("on_aborted", (3,), {}),
        ("on_offered", (4,), {}),
        ("on_upstream_lost", (5, None), {}),
    ]


async def test_a_new_version_is_news_and_an_excerpt_is_not():
    peer, holding = Peer(), FakeHolding(0, 1)
    peer.ingest.on_opened(holding)
    assert peer.freshness.named("note_version") == [(Version(0, 1), 10.0)]
    assert peer.missing.named("on_opened") == [holding]
    assert peer.timeline.named("receiving") == [(Version(0, 1), Version(0, 0), 10.0)]
    assert peer.planner.names == ["replan"]
    peer.ingest.on_opened(FakeHolding(1, 2, excerpt=True))
    assert len(peer.freshness.calls) == 1


async def test_a_complete_version_is_sealed_only_once_the_hub_confirms():
    peer, holding = Peer(), FakeHolding(0, 1, complete=True, size=500)
    holding.had_bytes = 100
    peer.ingest.on_complete(holding)
    assert peer.timeline.named("received") == [(Version(0, 1), 2.0)]
    assert peer.transfers == [(400, 2.0)]
    sealing = asyncio.create_task(peer.background.run())
    await asyncio.sleep(0)
    assert peer.store.calls == []
    holding.confirmed.set()
    assert await sealing == ["seal 0.1"]
    assert holding.durable
    assert peer.store.names == ["seal", "retain"]
    assert peer.store.named("retain") == [frozenset([b"needed", artifact(0, 1)])]
    assert peer.planner.names[-1] == "replan"


async def test_artifacts_removed_by_retention_leave_the_node():
    peer, holding = Peer(), FakeHolding(0, 1, complete=True, confirmed=True)
    peer.store.answers["retain"] = [SimpleNamespace(id=b"old")]
    peer.ingest.on_complete(holding)
    await peer.background.run()
    assert peer.node.named("forget") == [b"old"]


async def test_an_artifact_that_is_aborted_meanwhile_is_not_sealed():
    peer, holding = Peer(), FakeHolding(0, 1, complete=True)
    peer.ingest.on_complete(holding)
    holding.end()
    await peer.background.run()
    assert peer.store.calls == []


async def test_a_store_that_fails_ends_the_node_once():
    peer, holding = Peer(), FakeHolding(0, 1, complete=True, confirmed=True)
    peer.store.answers["seal"] = LocalError("no space left")
    for _ in range(2):
        peer.ingest.on_complete(holding)
        await peer.background.run()
    with pytest.raises(LocalError, match="no space left"):
        await peer.node.error


async def test_the_hubs_confirmation_counts_without_the_parents():
    peer, holding = Peer(entry(0, 1, durable=b"record")), FakeHolding(0, 1, complete=True)
    peer.ingest.on_complete(holding)
    assert peer.node.named("confirm") == [(holding, b"record")]
    holding.end()
    await peer.background.run()


async def test_an_aborted_version_is_told_and_an_aborted_excerpt_is_not():
    peer, version, excerpt = Peer(), FakeHolding(0, 1), FakeHolding(1, 2, excerpt=True)
    peer.ingest.on_aborted(version)
    peer.ingest.on_aborted(excerpt)
    assert peer.removal.named("remove_aborted") == [version, excerpt]
    assert peer.timeline.named("aborted") == [Version(0, 1)]
    assert peer.planner.names == ["replan"]


@pytest.mark.parametrize(
    ("connected", "live", "beside", "wanted"),
    [(False, True, False, True), (True, True, False, False), (False, False, False, False), (False, True, True, False)],
)
async def test_without_the_hub_a_parents_newer_versions_are_wanted(connected, live, beside, wanted):
    peer, parent = Peer(), FakeParent()
    peer.hub.connected, parent.live, parent.beside = connected, live, beside
    peer.ingest.on_offered(parent)
    assert ("want_newer" in parent.names) is wanted
    peer.ingest.on_upstream_lost(parent, None)
    assert peer.planner.names == ["replan", "replan"]
