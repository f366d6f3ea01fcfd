"""The peer's report, status, conditions of /wait, readiness and metrics, from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.relay.artifact_path import Gap
from p2pcast.relay.child_lag import Inflow
from p2pcast.relay.node import Node
from p2pcast.trust.join_token import JoinToken
from rollout_node.control.activity import Activity
from rollout_node.control.freshness import Freshness
from rollout_node.control.reporter import ReportedChanges
from rollout_node.peer_config import PeerConfig
from rollout_node.peer_view import PeerView
from rollout_node.timeline import Timeline

NODE, PARENT = b"n" * 16, b"p" * 16
V = Version


def engine(name: str, committed: Version | None, *, ready: bool = True, error: str | None = None) -> dict[str, Any]:
    version = None if committed is None else str(committed)
    return {"name": name, "ready": ready, "committed": version, "error": error, "pause_s": 0.5}


def incomplete(version: Version, held: int, pieces: int, *, excerpt: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        incomplete=True, excerpt=excerpt, open=SimpleNamespace(version=version),
        artifact=SimpleNamespace(held=SimpleNamespace(count=held)), assembly=SimpleNamespace(pieces=pieces),
    )  # fmt: skip


class Parts:
    """A view, and the parts that a test changes."""

    def __init__(self, folder: Path, **config: Any) -> None:
        (folder / "shadow").mkdir()
        options: dict[str, Any] = {"hub": ("192.0.2.1", 7), "targets": (), "name": "a"} | config
        token = JoinToken(bytes(16), bytes(20))
        self.config = PeerConfig(token=token, state=folder, shadow=folder / "shadow", **options)
        self.events = Events()
        self.activity = Activity(lambda: None)
        self.freshness = Freshness(None, 0.0)
        self.state = SimpleNamespace(shadow=None, staged=None)
        self.hub_session = SimpleNamespace(last_received_at=None, connected=False)
        self.engines = SimpleNamespace(found=[], committed=None)
        self.engines.rows = lambda: self.engines.found
        self.parent_failover = SimpleNamespace(settled=(1, 2), parent=None, feeding=None, beside=None)
        self.listed: dict[Version, int] = {}
        self.gap: Gap | None = None
        self.identities: dict[Version, bytes] = {}
        owner: Any = SimpleNamespace()
        self.node = Node(owner, NODE, bytes(32))
        self.view = PeerView(
            config=self.config, ident=NODE, cores=4, activity=self.activity, events=self.events,
            tasks=Tasks(self.events), timeline=Timeline(self.events), freshness=self.freshness,
            hub_session=self.hub_session,
            certificate=None, state=self.state,
            node=self.node, downstream=self.node.downstream, parent_failover=self.parent_failover,
            planner=SimpleNamespace(states=lambda: self.listed, gap=lambda: self.gap),
            downloader=SimpleNamespace(artifacts=[], sources=[], bytes_received=9),
            missing_versions=SimpleNamespace(withheld=2),
            mirror_source=None, engines=self.engines, lead=None, member=None,
            socket_path=folder / "install.sock", leases=list, identities=lambda: self.identities,
            schedule_names=dict,
            http_address=lambda: ("127.0.0.1", 80),
        )  # fmt: skip

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """Samples by metric."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self.view.families():
            found[family.name] = [(sample.labels, sample.value) for sample in family.samples]
        return found


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Parts]]:
    made: list[Parts] = []

    def found(**config: Any) -> Parts:
        made.append(Parts(tmp_path, **config))
        return made[-1]

    yield found
    for parts in made:
        parts.view.downstream.close()
        parts.node.close()


@pytest.fixture
async def parts(make: Callable[..., Parts]) -> Parts:
    return make()


# -- reports and status


async def test_a_report_before_the_first_version(parts: Parts) -> None:
    report = parts.view.report(None, ReportedChanges())
    assert (report.staged, report.committed, report.parent, report.link) == (None, None, None, None)
    assert (report.state, report.epoch, report.cores, report.http) == ("joining", (1, 2), 4, ("127.0.0.1", 80))
    assert (report.progress, report.inflow, report.transfer, report.engines) == (None, None, None, [])


async def test_a_report_names_the_parents_link_and_the_running_transfer(parts: Parts) -> None:
    link = SimpleNamespace(dialled=True, address="192.0.2.2:7")
    parts.parent_failover.parent = PARENT
    parts.parent_failover.feeding = SimpleNamespace(link=link, inflow=Inflow(1000, 0.5, 70))
    parts.node.holdings[b"one"] = incomplete(V(0, 2), 3, 10)
    parts.node.holdings[b"old"] = incomplete(V(0, 1), 1, 10)
    parts.node.holdings[b"part"] = incomplete(V(0, 9), 1, 10, excerpt=True)
    report = parts.view.report((5, 6), ReportedChanges(held=[b"a" * 16]))
    assert (report.held, report.dropped) == ([b"a" * 16], None)
    assert (report.parent, report.transfer, report.inflow) == (PARENT, (5, 6), (1000, 500_000, 70))
    assert report.link == {"dialled_by": "child", "address": "192.0.2.2:7"}
    assert report.progress == {"version": "0.2", "pieces": 3, "of": 10}
    link.dialled = False
    parts.parent_failover.feeding.inflow = None
    report = parts.view.report(None, ReportedChanges())
    assert report.link == {"dialled_by": "parent", "address": "192.0.2.2:7"}
    assert report.inflow is None
    parts.node.holdings.clear()


async def test_a_report_is_bounded(parts: Parts) -> None:
    long = "x" * (limits.MAX_REPORTED_ERROR + 1)
    parts.engines.found = [engine(f"e{n}", None, error=long) for n in range(limits.MAX_PEER_ENGINES + 1)]
    parts.activity.error = long
    report = parts.view.report(None, ReportedChanges())
    assert report.error == long[:-1]
    assert report.engines is not None
    assert len(report.engines) == limits.MAX_PEER_ENGINES
    assert {row["error"] for row in report.engines} == {long[:-1]}
    assert parts.view.status()["error"] == long


async def test_status_names_the_versions_and_the_hub(parts: Parts) -> None:
    status = parts.view.status()
    assert status["hub"] == {"address": "192.0.2.1:7", "connected": False, "heard_s": None}
    assert status["knowledge"] == {"age_s": None, "source": None, "max_age_s": None}
    assert (status["staged"], status["committed"], status["digests"], status["links"]) == (None, None, {}, [])
    assert (status["role"], status["node"], status["security"]) == ("peer", NODE.hex(), "plaintext")
    parts.state.staged, parts.engines.committed = V(0, 2), V(0, 1)
    parts.state.shadow = SimpleNamespace(state_digest=255, layout=SimpleNamespace(layout_id=b"l"))
    parts.hub_session.last_received_at = asyncio.get_running_loop().time()
    status = parts.view.status()
    assert (status["staged"], status["committed"]) == ("0.2", "0.1")
    assert (status["digests"], status["layout_id"]) == ({"0.2": "00000000000000ff"}, "6c")
    assert status["knowledge"]["source"] == "hub"
    assert status["hub"]["heard_s"] >= 0


async def test_a_peer_without_a_hub_shows_none(make: Callable[..., Parts]) -> None:
    assert make(hub=None).view.status()["hub"] is None


async def test_an_engine_with_a_long_name_is_reported_under_a_shorter_one(parts: Parts) -> None:
    parts.engines.found = [engine("exec:" + "x" * 300 + last, V(0, 1), ready=False, error="no") for last in "ab"]
    names = [row["name"] for row in parts.view.report(None, ReportedChanges()).engines or ()]
    assert len(set(names)) == 2
    assert {len(name) for name in names} == {limits.MAX_ENGINE_NAME}


# -- readiness


async def test_a_peer_is_ready_once_all_its_engines_are(parts: Parts) -> None:
    assert parts.view.ready() == (False, "no version is staged")
    parts.state.staged = V(0, 1)
    parts.engines.found = [engine("x", None, ready=False), engine("y", None, ready=False, error="no memory")]
    assert parts.view.ready() == (False, "y: no memory; x: no verified weights yet")
    parts.engines.found = [engine("x", V(0, 1)), engine("y", V(0, 1), ready=False, error="paused")]
    assert parts.view.ready() == (False, "y: paused")
    parts.engines.found = [engine("x", V(0, 1)), engine("y", V(0, 1))]
    assert parts.view.ready() == (True, "")
    parts.gap = Gap(V(0, 1), V(0, 2), V(0, 3))
    assert parts.view.ready() == (False, str(parts.gap))
    assert parts.view.status()["error"] == parts.view.report(None, ReportedChanges()).error == str(parts.gap)
    parts.gap = None
    parts.activity.draining = True
    assert parts.view.ready() == (False, "it is ending")


@pytest.mark.parametrize(
    ("connected", "why"),
    [(True, "engine big: no verified weights yet"), (False, "engine big: its lead is out of reach")],
)
async def test_a_member_is_ready_with_its_engine(parts: Parts, connected: bool, why: str) -> None:
    parts.state.staged = V(0, 1)
    member: Any = SimpleNamespace(name="big", ready=False, connected=connected)
    parts.view.member = member
    assert parts.view.ready() == (False, why)
    member.ready = True
    assert parts.view.ready() == (True, "")


async def test_a_peer_with_old_news_is_unready(make: Callable[..., Parts]) -> None:
    parts = make(max_age_s=60.0)
    parts.state.staged = V(0, 1)
    assert "has yet said which version is the newest" in parts.view.ready()[1]
    now = asyncio.get_running_loop().time()
    parts.freshness.note_source("mirror", now - 100)
    assert "s old (--max-age 60)" in parts.view.ready()[1]
    parts.hub_session.last_received_at = now
    assert parts.view.ready() == (True, "")


# -- conditions of /wait


async def test_a_version_is_published_once_listed_or_staged(parts: Parts) -> None:
    published = parts.view.waits().conditions["published"]
    assert published(V(0, 1), None) == (False, {"newest": None})
    parts.listed[V(0, 1)] = 7
    assert published(V(0, 1), None) == (True, {"newest": "0.1"})
    parts.state.staged = V(0, 2)
    assert published(V(0, 2), None) == (True, {"newest": "0.2"})
    assert published(V(0, 3), None) == (False, {"newest": "0.2"})


async def test_a_version_is_staged_once_that_or_a_newer_version_is(parts: Parts) -> None:
    staged = parts.view.waits().conditions["staged"]
    assert staged(V(0, 1), None) == (False, {"staged": None})
    parts.state.staged = V(0, 2)
    assert [staged(V(0, step), None)[0] for step in (1, 2, 3)] == [True, True, False]


async def test_a_version_is_live_at_a_share_of_the_engines(parts: Parts) -> None:
    live = parts.view.waits().conditions["live"]
    assert live(V(0, 1), None) == (False, {"engines": {}}), "a peer without engines serves nothing"
    parts.engines.found = [engine("x", V(0, 2)), engine("y", V(0, 1)), engine("z", None, ready=False)]
    shown = {"x": "0.2", "y": "0.1", "z": None}
    assert live(V(0, 1), None) == (False, {"engines": shown})
    assert live(V(0, 1), 0.66)[0]
    assert not live(V(0, 2), 0.66)[0]
    assert live(V(0, 2), 0.33)[0]
    parts.engines.found[0]["ready"] = False
    assert not live(V(0, 2), 0.0)[0], "no engine serves it"
    member: Any = SimpleNamespace(name="big", ready=True, serves=V(0, 2))
    parts.view.member = member
    assert live(V(0, 2), 0.25) == (True, {"engines": shown | {"big": "0.2"}})


# -- metrics


async def test_metrics_show_versions_and_engines(parts: Parts) -> None:
    found = parts.metrics()
    assert found["p2pcast_peer_staged_step"] == found["p2pcast_peer_committed_step"] == []
    assert "p2pcast_peer_knowledge_age_seconds" not in found
    assert "p2pcast_peer_certificate_end_timestamp_seconds" not in found
    parts.state.staged, parts.engines.committed = V(0, 3), V(0, 1)
    parts.listed |= {V(0, 1): 0, V(0, 2): 0}
    parts.engines.found = [engine("x", V(0, 1)), engine("y", None, ready=False) | {"pause_s": None}]
    parts.hub_session.connected, parts.hub_session.last_received_at = True, asyncio.get_running_loop().time()
    certificate: Any = SimpleNamespace(until=1e9)
    parts.view.certificate = certificate
    found = parts.metrics()
    assert found["p2pcast_peer_staged_step"] == [({}, 3.0)]
    assert found["p2pcast_peer_committed_step"] == [({}, 1.0)]
    assert found["p2pcast_peer_hub_connected"] == [({}, 1.0)]
    assert found["p2pcast_peer_engine_ready"] == [({"engine": "x"}, 1.0), ({"engine": "y"}, 0.0)]
    assert found["p2pcast_peer_last_commit_pause_seconds"] == [({"engine": "x"}, 0.5)]
    assert found["p2pcast_peer_lag_versions"][0] == ({"engine": "x"}, 2.0)
    assert found["p2pcast_peer_certificate_end_timestamp_seconds"] == [({}, 1e9)]
    assert "p2pcast_peer_knowledge_age_seconds" in found
