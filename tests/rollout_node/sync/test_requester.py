from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fake_holding import (
    FakeCatalog,
    FakeHolding,
    FakeMirror,
    FakeNode,
    FakeParent,
    FakeParentFailover,
    artifact,
    entry,
)
from recorder import Recorder

from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.artifact_path import Edge
from rollout_node.sync import requester as module
from rollout_node.sync.mirror_catalog import NoMirror
from rollout_node.sync.requester import PATIENCE_S, Requester
from rollout_node.sync.source_choice import SMALL_BYTES
from tests.support.until import until

LARGE = SMALL_BYTES + 1
NOW = 100.0
ONE_TWO = artifact(1, 2)


def edge(base, version, size=LARGE) -> Edge:
    return Edge(artifact(base, version), None if base is None else Version(0, base), Version(0, version), size)


class Downloader(Recorder):
    def __init__(self) -> None:
        super().__init__(sourceless=[], wishes=set())

    def fetches(self, ident) -> bool:
        return ident in self.wishes

    def drop(self, ident) -> None:
        self.calls.append(("drop", (ident,), {}))
        self.wishes.discard(ident)


class Peer:
    def __init__(self, path=(), *holdings, entries=(), parent=None, mirror=None, staged=1) -> None:
        self.squashes = Recorder(asks=False)
        self.squashes.answers = {"should_ask": None, "waits": False}
        self.planner = Recorder(
            begun=asyncio.Event(), news=Wakeup(), squashes=self.squashes, path=lambda: list(path), state_bytes=1000
        )
        self.planner.answers = {"needed": frozenset(), "edges": []}
        self.node, self.parent, self.parent_failover = FakeNode(*holdings), parent, FakeParentFailover(parent)
        self.downloader, self.missing = Downloader(), Recorder()
        self.missing.answers["check"] = False
        self.given_up, self.asked, self.hub_answers = [], [], True
        self.requester = Requester(
            planner=self.planner,
            state=SimpleNamespace(staged=Version(0, staged)),
            catalog=FakeCatalog(*entries),
            node=self.node,
            parent_failover=self.parent_failover,
            downloader=self.downloader,
            missing_versions=self.missing,
            mirror=mirror or NoMirror(),
            ask_squash=self.ask_squash,
            give_up=self.given_up.append,
        )

    def ask_squash(self, base) -> bool:
        self.asked.append(base)
        return self.hub_answers

    def request(self) -> bool:
        return self.requester.request(NOW)

    @property
    def pulled(self) -> list[bytes]:
        return self.downloader.named("fetch")


async def test_held_and_incoming_artifacts_are_not_requested():
    path = [edge(1, 2), edge(2, 3)]
    peer = Peer(path, FakeHolding(1, 2, complete=True), FakeHolding(2, 3, source="parent"))
    assert not peer.request()
    assert peer.downloader.calls == []


async def test_a_small_artifact_comes_from_an_offering_parent():
    parent = FakeParent(ONE_TWO)
    peer = Peer([edge(1, 2)], entries=[entry(1, 2, size=SMALL_BYTES)], parent=parent)
    assert not peer.request()
    assert parent.named("want") == [ONE_TWO]
    assert peer.pulled == []


async def test_a_large_artifact_is_pulled_despite_the_parents_offer():
    parent = FakeParent(ONE_TWO)
    peer = Peer([edge(1, 2)], entries=[entry(1, 2, size=LARGE)], parent=parent)
    assert peer.request()
    assert parent.named("want") == []
    assert peer.pulled == [ONE_TWO]


async def test_an_idle_artifact_of_the_path_is_wanted_after_all():
    holding = FakeHolding(1, 2, idle=True)
    peer = Peer([edge(1, 2)], holding, entries=[entry(1, 2)])
    peer.request()
    assert not holding.idle


async def test_a_parent_has_its_time_before_a_sealed_artifact_is_pulled():
    parent = FakeParent()
    peer = Peer([edge(1, 2)], entries=[entry(1, 2, sealed_at=NOW - PATIENCE_S)], parent=parent)
    assert peer.request()
    assert peer.pulled == []
    peer = Peer([edge(1, 2)], entries=[entry(1, 2, sealed_at=NOW - PATIENCE_S - 1)], parent=parent)
    assert peer.request()
    assert peer.pulled == [ONE_TWO]
    assert peer.missing.named("on_missed") == [(ONE_TWO, parent, NOW)]


async def test_without_a_parent_no_parent_is_complained_of():
    peer = Peer([edge(1, 2)], entries=[entry(1, 2)])
    peer.request()
    assert peer.pulled == [ONE_TWO]
    assert peer.missing.named("on_missed") == []


async def test_a_parent_attached_after_the_seal_must_offer_to_push():
    parent = FakeParent()
    parent.attached.set()
    peer = Peer([edge(1, 2)], entries=[entry(1, 2, sealed_at=NOW - 1)], parent=parent)
    peer.parent_failover.moved_at = NOW - 0.5
    peer.request()
    assert peer.pulled == [ONE_TWO]


async def test_a_parent_still_sending_an_earlier_version_is_given_time():
    peer = Peer([edge(1, 2)], entries=[entry(1, 2)], parent=FakeParent())
    peer.parent_failover.receiving = Version(0, 1)
    assert peer.request()
    assert peer.pulled == []


async def test_withheld_artifacts_are_pulled_and_reported():
    parent = FakeParent()
    parent.withheld.add(ONE_TWO)
    peer = Peer([edge(1, 2)], entries=[entry(1, 2, sealed_at=NOW)], parent=parent)
    peer.request()
    assert peer.pulled == [ONE_TWO]
    assert peer.missing.named("complain") == [(ONE_TWO, parent, NOW)]


async def test_an_artifact_of_the_mirror_is_left_to_the_mirror():
    peer = Peer([edge(1, 2)], entries=[entry(1, 2)], mirror=FakeMirror(a=entry(1, 2)))
    assert peer.request()
    assert peer.pulled == []


async def test_artifacts_without_a_pull_source_come_from_mirror_or_parent():
    parent = FakeParent(ONE_TWO)
    peer = Peer([], parent=parent, mirror=FakeMirror(a=entry(2, 3)))
    peer.downloader.sourceless = [ONE_TWO, artifact(2, 3), artifact(3, 4)]
    peer.request()
    assert peer.downloader.named("drop") == [ONE_TWO, artifact(2, 3)]
    assert parent.named("want") == [ONE_TWO]


@pytest.mark.parametrize(
    ("holding", "gone"),
    [
        (FakeHolding(1, 2), True),
        (FakeHolding(1, 2, idle=True, source="parent"), True),
        (FakeHolding(1, 2, source="parent"), False),
        (FakeHolding(1, 2, complete=True), False),
        (FakeHolding(1, 2, excerpt=True), False),
        (FakeHolding(5, 6), False),  # the hub has not sealed it
    ],
)
async def test_artifacts_off_the_path_without_a_source_are_given_up(holding, gone):
    peer = Peer([], holding, entries=[entry(1, 2)])
    peer.request()
    assert peer.given_up == [holding] * gone
    peer.given_up.clear()
    peer.planner.answers["needed"] = frozenset([holding.id])
    peer.request()
    assert peer.given_up == []


async def test_pulled_artifacts_are_not_given_up():
    peer = Peer([], FakeHolding(1, 2), entries=[entry(1, 2)])
    peer.downloader.wishes.add(ONE_TWO)
    peer.request()
    assert peer.given_up == []


async def test_while_a_squash_is_awaited_nothing_else_is_asked_for():
    path = [edge(1, 2), edge(2, 3)]
    peer = Peer(path, entries=[entry(1, 2), entry(2, 3)])
    peer.squashes.answers = {"should_ask": Version(0, 1), "waits": True}
    assert peer.request()
    assert peer.asked == [Version(0, 1)]
    assert peer.squashes.named("asked") == [(Version(0, 1), NOW)]
    assert peer.pulled == []


async def test_a_hub_out_of_reach_is_asked_for_no_squash():
    peer = Peer([edge(1, 2)], entries=[entry(1, 2)])
    peer.hub_answers, peer.squashes.answers["should_ask"] = False, Version(0, 1)
    peer.request()
    assert peer.squashes.named("asked") == []


async def test_behind_a_whole_state_a_squash_begins_at_that_state():
    path = [edge(None, 5), edge(5, 6), edge(6, 7)]
    peer = Peer(path, entries=[entry(None, 5), entry(5, 6), entry(6, 7)])
    peer.squashes.asks, peer.squashes.answers["waits"] = True, True
    assert peer.request()
    ((held, missing, _),) = peer.squashes.named("should_ask")
    assert (held, missing) == (Version(0, 5), path[1:])
    assert peer.pulled == [artifact(None, 5)]  # the deltas behind it may become one squash meanwhile


async def test_the_requester_waits_until_the_version_on_disk_is_known(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    peer = Peer([edge(1, 2)], entries=[entry(1, 2)])
    task = asyncio.create_task(peer.requester.run())
    await asyncio.sleep(0)
    assert peer.pulled == []
    peer.planner.begun.set()
    await until(lambda: len(peer.pulled) == 2)  # requested again without news, since an artifact is missing
    task.cancel()
    await asyncio.wait([task])
