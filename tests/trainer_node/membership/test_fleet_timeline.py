"""Events and measured times that the hub derives from reports."""

from __future__ import annotations

from typing import Any

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from trainer_node.membership.engine_reports import EngineRow
from trainer_node.membership.fleet_timeline import KEPT, FleetTimeline
from trainer_node.membership.peer_record import PeerRecord

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))


class Hub:
    """A fleet of one peer, ``a``, with one engine."""

    def __init__(self, joined_at: float = 0.0) -> None:
        self.events = Events()
        self.fleet = FleetTimeline(self.events)
        self.peer = PeerRecord("aa", "a", "", "host", 1, joined_at)
        self.fleet.joined(self.peer)

    def report(
        self,
        now: float,
        staged: Version | None = None,
        committed: Version | None = None,
        ready: bool = True,
        **row: Any,
    ) -> None:
        self.peer.staged = staged
        self.peer.engines = [EngineRow("e", True, ready, staged, committed, **row)]
        self.fleet.reported(self.peer, now)

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [dict(e.facts) for e in self.events.after(0, 1000)[1] if e.kind == kind]

    def measured(self, what: str) -> tuple[float, float]:
        """(count, sum) of a histogram."""
        family = next(f for f in self.fleet.families() if f.name == f"p2pcast_hub_publish_to_{what}_seconds")
        values = {s.name.rpartition("_")[2]: s.value for s in family.samples}
        return values.get("count", 0.0), values.get("sum", 0.0)


def test_a_version_is_measured_from_its_beginning():
    hub = Hub()
    hub.fleet.began(ONE, 10.0)
    hub.fleet.began(ONE, 12.0)  # the first word counts
    hub.report(13.0, staged=ONE)
    hub.report(14.0, staged=ONE)
    assert hub.told("staged") == [{"peer": "a", "version": "0.1", "after_s": 3.0}]
    hub.report(15.0, staged=ONE, committed=ONE, pause_s=0.5, recomputed_tokens=7)
    hub.report(16.0, staged=ONE, committed=ONE, pause_s=0.5, recomputed_tokens=7)
    assert hub.told("committed") == [
        {"peer": "a", "engine": "e", "version": "0.1", "pause_s": 0.5, "recomputed_tokens": 7, "after_s": 5.0}
    ]
    assert hub.measured("staged") == (1, 3.0)
    assert hub.measured("live") == (1, 5.0)


def test_later_peers_are_not_measured():
    hub = Hub(joined_at=11.0)
    hub.fleet.began(ONE, 10.0)
    hub.report(12.0, staged=ONE, committed=ONE)
    assert hub.told("staged")[0]["after_s"] is None
    assert hub.told("committed")[0]["after_s"] is None
    assert hub.measured("staged") == hub.measured("live") == (0, 0)


def test_a_ready_engine_is_live():
    hub = Hub()
    hub.fleet.began(ONE, 10.0)
    hub.report(11.0, staged=ONE, committed=ONE, ready=False)
    assert hub.told("committed") == []
    hub.report(12.0, staged=ONE, committed=ONE)
    assert hub.told("committed")[0]["after_s"] == 2.0


def test_an_engine_that_lost_its_weights_is_not_measured_again():
    hub = Hub()
    hub.fleet.began(ONE, 10.0)
    hub.report(11.0, staged=ONE, committed=ONE)
    hub.report(500.0, staged=ONE, ready=False, error="restarted")
    assert hub.told("unready") == [{"peer": "a", "engine": "e", "version": None, "why": "restarted"}]
    hub.report(510.0, staged=ONE, committed=ONE)
    assert [f["after_s"] for f in hub.told("committed")] == [1.0, None]
    hub.fleet.began(TWO, 600.0)
    hub.report(602.0, staged=TWO, committed=TWO)
    assert hub.measured("live") == (2, 3.0)


def test_metrics_of_a_lost_peer_are_removed():
    hub = Hub()
    hub.fleet.began(ONE, 10.0)
    hub.report(11.0, staged=ONE, committed=ONE)
    hub.fleet.left(hub.peer, "")
    hub.fleet.left(hub.peer, "silent for 5 s")
    assert hub.told("left") == [
        {"peer": "a", "node": "aa", "lost": False, "why": None},
        {"peer": "a", "node": "aa", "lost": True, "why": "silent for 5 s"},
    ]
    assert hub.measured("staged") == hub.measured("live") == (0, 0)


def test_each_plan_is_reported_once():
    hub = Hub()
    for _ in range(2):
        hub.fleet.plan_changed((1, 2), [["a", "hub"]])
    assert hub.told("plan") == [{"epoch": [1, 2], "moved": [["a", "hub"]]}]


def test_beginnings_are_bounded():
    hub = Hub()
    for step in range(2 * KEPT):
        hub.fleet.began(Version(0, step), 0.0)
    assert len(hub.fleet._began) == KEPT
    hub.report(1.0, staged=Version(0, 2))
    assert hub.told("staged")[0]["after_s"] is None


def test_a_peer_that_names_engines_without_end_gets_no_more_rows():
    hub = Hub()
    for n in range(limits.MAX_PEER_ENGINES + 50):
        version = Version(0, n)
        hub.fleet.began(version, float(n + 1))
        hub.peer.engines = [EngineRow(f"e{n}", True, True, version, version)]
        hub.fleet.reported(hub.peer, n + 1.5)
    assert len(hub.fleet._live._rows) == limits.MAX_PEER_ENGINES
