from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_holding import FakeHolding, FakeNode, FakeParent, FakeParentFailover, artifact, row
from recorder import Recorder

from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.sync.catalog_updater import CatalogUpdater


class Peer:
    def __init__(self, *holdings, parent=None) -> None:
        self.node, self.downloader = FakeNode(*holdings), Recorder()
        self.events = []
        self.updater = CatalogUpdater(
            ArtifactCatalog(),
            self.node,
            FakeParentFailover(parent),
            self.downloader,
            SimpleNamespace(joined_at=5.0),
            lambda: self.events.append("whole"),
            lambda identities: self.events.append(identities),
            lambda: self.events.append("replan"),
        )

    def apply(self, *rows, dropped=()) -> None:
        self.updater.apply(messages.Catalog(rows, dropped), 1.0)


async def test_the_first_catalog_is_the_whole_list():
    peer = Peer()
    peer.apply(row(0, 1))
    peer.apply(row(1, 2))
    assert peer.events == ["whole", {}, "replan", {}, "replan"]


@pytest.mark.parametrize(
    ("holding", "opened_at", "aborted"),
    [
        (FakeHolding(0, 1), 4.0, True),
        (FakeHolding(0, 1), 6.0, False),  # newer than the hub's list, perhaps
        (FakeHolding(0, 1, idle=True), 6.0, True),
        (FakeHolding(0, 1, complete=True), 4.0, True),
        (FakeHolding(0, 1, complete=True, confirmed=True), 4.0, False),
    ],
)
async def test_artifacts_missing_from_the_whole_list_are_aborted(holding, opened_at, aborted):
    holding.opened_at = opened_at
    peer = Peer(holding)
    peer.apply()
    assert peer.node.named("abort") == [holding] * aborted


async def test_a_dropped_artifact_is_neither_pulled_nor_received():
    holding = FakeHolding(1, 2)
    holding.opened_at = 9.0
    peer = Peer(holding)
    peer.apply()
    peer.apply(dropped=[holding.id, b"unknown"])
    assert peer.downloader.named("drop") == [holding.id, b"unknown"]
    assert peer.node.named("abort") == [holding]


async def test_a_parent_is_expected_to_send_a_new_artifact():
    parent = FakeParent()
    peer = Peer(parent=parent)
    peer.apply(row(0, 1, sealed=False))
    assert parent.calls == []  # the whole list is no news
    peer.apply(row(1, 2, sealed=False), row(2, 3))
    assert parent.named("expect") == [artifact(1, 2)]


async def test_the_hubs_durable_record_confirms_artifacts_sealed_here():
    sealed, unsealed = FakeHolding(0, 1, complete=True), FakeHolding(1, 2)
    peer = Peer(sealed, unsealed)
    peer.apply(row(0, 1, durable=b"a"), row(1, 2, durable=b"b"), row(2, 3, durable=b"c"))
    assert peer.node.named("confirm") == [(sealed, b"a")]
