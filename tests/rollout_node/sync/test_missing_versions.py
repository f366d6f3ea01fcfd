from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fake_holding import FakeCatalog, FakeHolding, FakeNode, FakeParent, FakeParentFailover, artifact, entry
from recorder import Recorder

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge
from rollout_node.sync.missing_versions import COMPLAINT_S, MISSES, WITHHELD_S, MissingVersions

HUB, ONE_TWO = b"h" * 16, artifact(1, 2)
PATH = [Edge(ONE_TWO, Version(0, 1), Version(0, 2), 1000)]
SLOW_S = WITHHELD_S + 2.0
"""Longer than a parent may be silent at a piece of ``fake_holding.PIECE`` bytes."""


class Peer:
    def __init__(self, *holdings, parent=None, entries=None) -> None:
        self.catalog = FakeCatalog(*([entry(1, 2)] if entries is None else entries))
        self.node, self.parent, self.timeline, self.reports = FakeNode(*holdings), parent, Recorder(), 0
        self.parent_failover = FakeParentFailover(parent)
        self.missing = MissingVersions(
            self.catalog, self.node, self.parent_failover, self.timeline, SimpleNamespace(hub=HUB, changed=self.report)
        )

    def report(self) -> None:
        self.reports += 1

    def check_until(self, seconds: float, path=PATH) -> bool:
        """As often as a peer checks, from 0 to ``seconds``."""
        found = False
        for tenth in range(int(seconds * 2) + 1):
            found = self.missing.check(path, self.parent, tenth / 2)
        return found

    @property
    def complaints(self):
        return {a: parent for a, (parent, _) in self.missing._complaints.items()}


def test_a_parent_that_stands_still_loses_the_version():
    parent = FakeParent()
    peer = Peer(FakeHolding(1, 2, source=parent), parent=parent)
    assert peer.check_until(WITHHELD_S - 1)
    assert parent.calls == []
    peer.check_until(SLOW_S)
    assert parent.named("give_up_on")[0] == ONE_TWO
    assert peer.missing.withheld >= 1
    assert peer.timeline.named("withheld")[0] == ("0.2", parent.link.remote)
    assert peer.complaints == {ONE_TWO: parent.link.remote}
    assert peer.reports == 1  # said once


def test_a_parent_that_gets_on_keeps_its_place():
    parent = FakeParent()
    holding = FakeHolding(1, 2, source=parent)
    peer = Peer(holding, parent=parent)
    for second in range(60):
        holding.artifact.held.count += 1
        peer.missing.check(PATH, parent, float(second))
    assert parent.calls == []
    assert peer.complaints == {}


def test_a_version_that_no_parent_owes_is_reported_without_one():
    peer = Peer(parent=FakeParent())
    peer.check_until(WITHHELD_S + 40)
    assert peer.complaints == {ONE_TWO: None}
    assert peer.parent.calls == []


def test_a_parent_owes_its_wanted_artifacts():
    parent = FakeParent()
    parent.wanted.add(ONE_TWO)
    peer = Peer(FakeHolding(1, 2), parent=parent)
    peer.check_until(SLOW_S)
    assert peer.complaints == {ONE_TWO: parent.link.remote}


def test_the_hub_is_not_named_in_complaints():
    parent = FakeParent(node=HUB)
    peer = Peer(FakeHolding(1, 2, source=parent), parent=parent)
    peer.check_until(SLOW_S)
    assert peer.complaints == {ONE_TWO: None}


def test_a_node_that_does_not_read_blames_no_parent():
    parent = FakeParent()
    peer = Peer(FakeHolding(1, 2, source=parent), parent=parent)
    peer.node.paused = True
    peer.check_until(SLOW_S)
    assert peer.complaints == {}


@pytest.mark.parametrize("path", [[], [Edge(artifact(5, 6), Version(0, 5), Version(0, 6), 1)]])
def test_only_sealed_artifacts_of_the_path_count(path):
    peer = Peer(parent=FakeParent())
    assert not peer.check_until(SLOW_S, path)
    assert not Peer(FakeHolding(1, 2, complete=True)).check_until(SLOW_S)


def test_a_parent_that_fails_to_open_several_versions_is_reported():
    parent = FakeParent()
    peer = Peer(parent=parent)
    for n in range(MISSES - 1):
        peer.missing.on_missed(artifact(n, n + 1), parent, 1.0)
    assert peer.complaints == {}
    peer.missing.on_missed(artifact(7, 8), parent, 1.0)
    assert peer.complaints == {artifact(7, 8): parent.link.remote}
    peer.missing.on_missed(artifact(7, 8), parent, 1.0)
    assert peer.reports == 1


def test_versions_opened_by_the_parent_count_in_its_favour():
    parent = FakeParent()
    peer = Peer(parent=parent)
    peer.missing.on_opened(FakeHolding(0, 1, source=parent))
    peer.missing.on_opened(FakeHolding(1, 2, source="another"))
    peer.missing.on_opened(FakeHolding(2, 3))
    assert list(peer.missing._opened) == [True]
    peer.missing.check([], parent, 0.0)
    assert list(peer.missing._opened) == []  # another parent begins anew


def test_complaints_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_MISSING", 2)
    peer = Peer()
    for n in range(5):
        peer.missing.complain(artifact(n, n + 1), None, 0.0)
    assert len(peer.complaints) == 2


async def test_a_complaint_ends_some_time_after_the_version_came():
    holding = FakeHolding(1, 2)
    peer = Peer(holding)
    now = asyncio.get_running_loop().time()
    peer.missing.complain(ONE_TWO, None, now - COMPLAINT_S - 1)
    assert peer.missing.rows() == [(ONE_TWO, None)]
    holding.complete = True
    assert peer.missing.rows() == []
    peer.missing.complain(ONE_TWO, None, now)
    assert peer.missing.rows() == [(ONE_TWO, None)]
    peer.missing.complain(artifact(8, 9), None, now - COMPLAINT_S - 1)
    assert peer.missing.rows() == [(ONE_TWO, None)]  # no catalog names the other one
