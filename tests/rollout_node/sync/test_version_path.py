from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_holding import FakeHolding, FakeMirror, FakeNode, FakeParent, FakeParentFailover, artifact, entry, row

from p2pcast.ground.version import Version
from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.sync.catchup_choice import CatchupChoice
from rollout_node.sync.mirror_catalog import NoMirror
from rollout_node.sync.version_path import VersionPlanner

DELTAS = (row(None, 0), row(0, 1), row(1, 2), row(2, 3))


class Peer:
    def __init__(self, *holdings, staged=None, rows=(), mirror=None, newest=None, parent=None, stored=()) -> None:
        self.catalog = ArtifactCatalog()
        if rows:
            self.catalog.update(messages.Catalog(rows, []), 0.0)
        self.orders = SimpleNamespace(hold=None, target=None)
        self.node = FakeNode(*holdings)
        self.manifests = {}
        self.state = SimpleNamespace(shadow=None, staged=None if staged is None else Version(0, staged))
        self.saved = SimpleNamespace(newest=newest)
        self.planner = VersionPlanner(
            state=self.state,
            orders=self.orders,
            catalog=self.catalog,
            mirror=mirror or NoMirror(),
            node=self.node,
            parent_failover=FakeParentFailover(parent),
            store=SimpleNamespace(artifacts=dict(enumerate(stored)), manifest=self.manifests.get),
            saved=self.saved,
            squashes=CatchupChoice("none", 1),
        )

    @property
    def path(self) -> list[bytes]:
        return [edge.artifact for edge in self.planner.path()]


async def test_a_new_peer_takes_the_whole_state_and_later_deltas():
    assert Peer(rows=DELTAS).path == [artifact(None, 0), artifact(0, 1), artifact(1, 2), artifact(2, 3)]


async def test_a_peer_continues_from_its_staged_version():
    assert Peer(staged=1, rows=DELTAS).path == [artifact(1, 2), artifact(2, 3)]
    assert Peer(staged=3, rows=DELTAS).path == []


async def test_no_way_is_computed_while_no_artifact_is_newer(monkeypatch):
    peer = Peer(staged=3, rows=DELTAS)
    monkeypatch.setattr(peer.planner.squashes, "way", None)
    assert peer.path == []
    peer.catalog.update(messages.Catalog([], [DELTAS[-1][0]]), 0.0)
    assert peer.path == []
    monkeypatch.undo()
    peer.catalog.update(messages.Catalog(DELTAS, []), 0.0)
    peer.state.staged = Version(0, 2)
    assert peer.path == [artifact(2, 3)], "the catalog's edges are those after its last change"


async def test_the_path_ends_where_the_hub_holds_the_shadow():
    peer = Peer(staged=1, rows=DELTAS)
    peer.orders.hold = Version(0, 2)
    assert peer.path == [artifact(1, 2)]
    assert peer.planner.needed() == {artifact(1, 2), artifact(2, 3)}  # retention leaves what leads on


async def test_a_held_artifact_costs_its_missing_bytes():
    whole = FakeHolding(1, 2, complete=True, confirmed=True, size=1000, held=10)
    half = FakeHolding(2, 3, source="parent", size=1000, held=4)
    making = FakeHolding(3, 4, source="parent")
    peer = Peer(whole, half, making, staged=1)
    edges = {e.version.step: e.bytes for e in peer.planner.edges()}
    assert edges == {2: 0, 3: 600, 4: 0}
    assert peer.path == [whole.id, half.id, making.id]


async def test_the_size_of_an_artifact_without_a_manifest_is_the_catalogs():
    peer = Peer(FakeHolding(1, 2, held=3), staged=1, rows=[row(1, 2, size=700)])
    assert [e.bytes for e in peer.planner.edges()] == [400]


@pytest.mark.parametrize(
    ("holding", "listed", "leads_on"),
    [
        (FakeHolding(1, 2, complete=True, confirmed=True), False, True),
        (FakeHolding(1, 2, complete=True), False, False),  # a hub that died had not stored it
        (FakeHolding(1, 2, complete=True), True, True),
        (FakeHolding(1, 2, source="parent"), True, True),
        (FakeHolding(1, 2, source="parent"), False, False),  # the parent alone knows of it
        (FakeHolding(1, 2), True, False),  # no source sends it, and no list names it
        (FakeHolding(1, 2, source="parent", excerpt=True), True, False),
    ],
)
async def test_only_artifacts_that_can_complete_are_edges(holding, listed, leads_on):
    peer = Peer(holding, staged=1)
    peer.node.is_listed = lambda ident: listed
    assert bool(peer.path) is leads_on


async def test_a_mirror_in_use_replaces_the_catalog_of_a_hub_that_is_gone():
    mirror = FakeMirror(a=entry(1, 2))
    assert {e.artifact for e in Peer(rows=DELTAS, mirror=mirror).planner.listed()} == set()
    mirror.edges = lambda: {artifact(1, 2): "edge"}
    assert list(Peer(rows=DELTAS, mirror=mirror).planner.listed()) == ["edge"]
    with_parent = Peer(rows=DELTAS, mirror=mirror, parent=FakeParent())
    assert len(with_parent.planner.listed()) == 4
    mirror.in_use = False
    assert len(Peer(rows=DELTAS, mirror=mirror).planner.listed()) == 4


async def test_mirrored_artifacts_are_edges_only_while_the_mirror_is_used():
    mirror, holding = FakeMirror(a=entry(1, 2)), FakeHolding(1, 2)
    assert Peer(holding, staged=1, mirror=mirror).path == [holding.id]
    mirror.in_use = False
    assert Peer(holding, staged=1, mirror=mirror).path == []


async def test_a_path_below_the_newest_staged_version_needs_the_hubs_list():
    peer = Peer(FakeHolding(None, 2, complete=True, confirmed=True), newest=Version(0, 3))
    assert peer.path == []  # the hub has not listed its versions
    peer.catalog.update(messages.Catalog([row(None, 2)], []), 0.0)
    assert peer.path == [artifact(None, 2)]  # now the run is known to have lost the newer one


async def test_a_mirror_that_shows_less_than_before_takes_no_engine_back():
    mirror = FakeMirror(a=entry(None, 2))
    holding = FakeHolding(None, 2)
    peer = Peer(holding, rows=[row(None, 1)], mirror=mirror, newest=Version(0, 3))
    assert peer.path == []
    peer.saved.newest = Version(0, 2)
    assert peer.path == [holding.id]


async def test_digests_and_layouts_come_from_hub_mirror_and_store():
    stored = [SimpleNamespace(version=Version(0, 1), manifest=SimpleNamespace(state=11))]
    mirror = FakeMirror(a=entry(1, 2, state=22))
    peer = Peer(rows=[row(2, 3)], mirror=mirror, stored=stored)
    assert peer.planner.states() == {Version(0, 1): 11, Version(0, 2): 22, Version(0, 3): 3}
    assert peer.planner.layout_of(artifact(2, 3)) == peer.planner.layout_of(artifact(1, 2)) == b"layout"
    assert peer.planner.layout_of(b"unknown") is None
    assert peer.planner.whole() == [(Version(0, 3), (b"layout", 3)), (Version(0, 2), (b"layout", 22))]
    mirror.in_use = False
    assert peer.planner.states() == {Version(0, 3): 3}


async def test_the_size_of_a_state_is_the_shadows_or_the_largest_known_layouts():
    peer = Peer()
    assert peer.planner.state_bytes == 0
    peer.node.layouts = {1: SimpleNamespace(nbytes=5), 2: SimpleNamespace(nbytes=7)}
    assert peer.planner.state_bytes == 7
    peer.state.shadow = SimpleNamespace(layout=SimpleNamespace(nbytes=3))
    assert peer.planner.state_bytes == 3


async def test_replan_rings():
    peer = Peer()
    rung = peer.planner.news._event
    peer.planner.replan()
    assert rung.is_set()


async def test_a_staged_version_is_superseded_once_the_next_artifact_is_whole():
    ahead = FakeHolding(1, 2, source=object())
    peer = Peer(ahead, staged=1, rows=DELTAS)
    assert peer.planner.next_holding() is ahead
    assert not peer.planner.is_superseded(Version(0, 1)), "a part of the next version is here"
    ahead.finished = True
    assert peer.planner.is_superseded(Version(0, 1))
    peer.orders.target = Version(0, 1)
    assert not peer.planner.is_superseded(Version(0, 1)), "engines are to switch to the staged version"
    assert Peer(staged=1, rows=DELTAS).planner.next_holding() is None
    assert Peer(staged=3, rows=DELTAS).planner.next_holding() is None


@pytest.mark.parametrize(
    ("staged", "hold", "target", "state"),
    [
        (None, None, None, "waiting"),
        (1, None, None, "waiting"),
        (3, None, None, "current"),
        (2, 2, None, "held"),
        (2, 2, 2, "current"),
        (5, None, None, "current"),
    ],
)
async def test_an_idle_peer_waits_is_held_or_is_current(staged, hold, target, state):
    peer = Peer(staged=staged, rows=DELTAS)
    peer.orders.hold = None if hold is None else Version(0, hold)
    peer.orders.target = None if target is None else Version(0, target)
    assert peer.planner.idle_state == state


@pytest.mark.parametrize(
    ("staged", "rows", "hold", "gap"),
    [
        (0, (0, 1, 3), None, (0, 2, 3)),
        (0, (0, 2), None, (0, 1, 2)),
        (2, (0, 3), None, None),
        (None, (0, 2, 3), None, (None, 1, 2)),
        (None, (1, 2), None, (None, 0, 1)),
        (0, (0, 1, 3), 1, None),
        (3, (0, 1), None, None),
    ],
)
async def test_no_way_differs_from_the_newest_version(staged, rows, hold, gap):
    """``rows``: the steps to which artifacts lead: a whole state at 0, deltas behind it."""
    peer = Peer(staged=staged, rows=[row(step - 1 if step else None, step) for step in rows])
    peer.orders.hold = None if hold is None else Version(0, hold)
    found = peer.planner.gap()
    shown = found and tuple(v and v.step for v in (found.held, found.base, found.version))
    assert shown == gap
    if found is not None and not peer.path:
        assert peer.planner.idle_state == "stranded"


async def test_a_squash_leads_past_a_lost_delta_where_squashes_are_not_wanted():
    peer = Peer(staged=0, rows=[row(0, 1), row(2, 3), row(0, 3)])
    assert peer.path == [artifact(0, 3)]
    peer.catalog.update(messages.Catalog([row(1, 2)], []), 0.0)
    assert peer.path == [artifact(0, 1), artifact(1, 2), artifact(2, 3)]


async def test_a_stored_manifest_names_a_versions_digest_before_the_hub():
    peer = Peer(rows=DELTAS)
    assert peer.planner.signed_digest(Version(0, 2)) == 2
    assert peer.planner.signed_digest(Version(0, 9)) is None
    peer.manifests[Version(0, 2)] = SimpleNamespace(state=77)
    assert peer.planner.signed_digest(Version(0, 2)) == 77
