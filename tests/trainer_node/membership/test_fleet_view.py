"""How peers are shown: /status, /wait, metrics."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from p2pcast.ground.version import Version
from trainer_node.membership.engine_reports import EngineRow, live_rows
from trainer_node.membership.fleet_view import FleetView
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import NO_REPORT, PeerRecord

V = Version
OLD, NEW = V(0, 1), V(0, 2)


@pytest.fixture
def members() -> Membership:
    made = Membership(1, 1e9, chains=1)
    for name in "ba":
        peer = PeerRecord(name * 32, name, "r", "::", 7, 0.0)
        peer.report = replace(NO_REPORT, state="live", http=("0.0.0.0", 80))
        made.join(peer, 0.0)
    return made


@pytest.fixture
def view(members: Membership) -> FleetView:
    return FleetView(members, lambda: {OLD, NEW}, clock=lambda: 10.0)


def engine(name: str, committed: Version | None, ready: bool = True) -> EngineRow:
    return EngineRow(name, True, ready, committed, committed, shown={"name": name})


def test_rows_are_sorted_by_name_and_name_the_parent(view: FleetView, members: Membership) -> None:
    members.peers["a" * 32].staged = NEW
    rows = view.rows()
    assert [row["name"] for row in rows] == ["a", "b"]
    assert [row["parent"] for row in rows] == ["b", "hub"]
    assert rows[0]["staged"] == "0.2"
    assert rows[1]["staged"] is None
    assert rows[0]["http"] == "[::]:80"
    assert rows[0]["state"] == "live"
    assert rows[0]["error"] is None
    assert view.chains() == [["b", "a"]]


def test_a_peer_without_http_shows_none(view: FleetView, members: Membership) -> None:
    members.peers["a" * 32].report = NO_REPORT
    assert view.rows()[0]["http"] is None


@pytest.mark.parametrize(
    ("fraction", "one", "both"), [(None, False, True), (0.5, True, True), (1.0, False, True), (0.0, True, True)]
)
def test_a_wait_for_staging_counts_peers(view, members, fraction, one, both) -> None:
    assert view.staged(NEW, fraction) == (False, {"peers": {"a": None, "b": None}})
    members.peers["a" * 32].staged = NEW
    assert view.staged(NEW, fraction)[0] == one
    members.peers["b" * 32].staged = NEW
    assert view.staged(OLD, fraction) == (both, {"peers": {"a": "0.2", "b": "0.2"}})


def test_a_wait_for_engines_counts_ready_engines(view: FleetView, members: Membership) -> None:
    assert view.live(OLD, 0.0) == (False, {"engines": {}}), "zero engines are never enough"
    members.peers["a" * 32].engines = [engine("x", NEW), engine("y", NEW, ready=False)]
    assert view.live(OLD, 0.5) == (True, {"engines": {"a/x": "0.2", "a/y": "0.2"}})
    assert not view.live(OLD, None)[0]


def test_only_ready_engines_serve_a_version(view: FleetView, members: Membership) -> None:
    assert view.serving() == {}
    one = members.peers["a" * 32]
    one.staged = Version(0, 2)
    one.engines = [engine("x", Version(0, 1)), engine("y", Version(0, 2), ready=False), engine("z", None, ready=False)]
    assert view.serving() == {"a" * 32: {"region": "r", "staged": "0.2", "engines": {"x": "0.1", "y": None, "z": None}}}


def test_metrics_name_each_peer_and_engine(view: FleetView, members: Membership) -> None:
    members.peers["a" * 32].engines = [engine("x", OLD)]
    members.peers["a" * 32].transfers = members.peers["a" * 32].transfers.record(9.0, 1 << 20, 1.0, True)
    values = {
        (family.name, *sample.labels.values()): sample.value
        for family in (*view.families(), *view.peer_families())
        for sample in family.samples
    }
    assert values["p2pcast_hub_chains",] == len(view.chains())
    assert values["p2pcast_hub_uplink_bits_per_second",] == 1e9
    assert values["p2pcast_hub_lag_versions", "a", "x"] == 1
    assert values["p2pcast_hub_engine_ready", "a", "x"] == 1
    assert values["p2pcast_hub_peer_bits_per_second", "b"] == 0
    assert ("p2pcast_hub_peer_score_part", "a", "speed") in values


def test_live_rows_are_bounded_and_named_by_peer(monkeypatch) -> None:
    peers = [SimpleNamespace(name="p", engines=[engine("x", NEW), engine("y", None, ready=False)])]
    assert live_rows(peers) == [("p/x", (0, 2), True), ("p/y", None, False)]
    monkeypatch.setattr("p2pcast.ground.limits.MAX_ENGINES", 1)
    monkeypatch.setattr("p2pcast.ground.limits.MAX_ENGINE_NAME", 2)
    assert live_rows(peers) == [("p/", (0, 2), True)]
