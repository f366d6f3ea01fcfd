"""Events and measured times of a peer's engines, derived from their status."""

from __future__ import annotations

from typing import Any

from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from rollout_node.installers.installer import CommitReport
from rollout_node.timeline import EngineNow, Timeline

ONE, TWO = (Version(0, n) for n in (1, 2))


class Peer:
    def __init__(self) -> None:
        self.events = Events()
        self.timeline = Timeline(self.events)

    def look(
        self, now: float, commits: int = 0, report: CommitReport | None = None, fault: str | None = None, **row: Any
    ) -> None:
        shown = {"name": "e", "ready": False, "staged": None, "committed": None, "error": fault} | row
        self.timeline.observe([EngineNow(shown, commits, report, fault)], now)

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        return [(e.kind, dict(e.facts)) for e in self.events.after(0, 1000)[1]]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told()]

    def value(self, name: str) -> float:
        samples = (s for family in self.timeline.families() for s in family.samples)
        return next((s.value for s in samples if s.name == name), 0.0)


def test_a_version_is_timed_from_its_opening_to_a_ready_engine():
    peer = Peer()
    peer.timeline.receiving(ONE, None, 10.0)
    peer.timeline.staged(ONE, 12.0)
    peer.look(13.0, commits=1, report=CommitReport(0.5, 7), ready=True, staged="0.1", committed="0.1")
    peer.look(14.0, commits=1, report=CommitReport(0.5, 7), ready=True, staged="0.1", committed="0.1")
    assert peer.told() == [
        ("receiving", {"version": "0.1", "base": None}),
        ("staged", {"version": "0.1", "after_s": 2.0}),
        ("committed", {"engine": "e", "version": "0.1", "pause_s": 0.5, "recomputed_tokens": 7, "after_s": 1.0}),
        ("ready", {"engine": "e", "version": "0.1"}),
    ]
    assert peer.value("p2pcast_peer_opened_to_staged_seconds_sum") == 2.0
    assert peer.value("p2pcast_peer_staged_to_live_seconds_sum") == 1.0
    assert peer.value("p2pcast_peer_commit_pause_seconds_sum") == 0.5
    assert peer.value("p2pcast_peer_recomputed_tokens_total") == 7


def test_a_version_from_an_earlier_process_has_no_beginning():
    peer = Peer()
    peer.timeline.staged(ONE, 12.0)
    assert peer.told() == [("staged", {"version": "0.1", "after_s": None})]
    assert peer.value("p2pcast_peer_opened_to_staged_seconds_count") == 0


def test_an_aborted_version_that_returns_is_not_measured():
    peer = Peer()
    peer.timeline.receiving(ONE, None, 10.0)
    peer.timeline.aborted(ONE)
    peer.timeline.receiving(ONE, None, 100.0)
    peer.timeline.staged(ONE, 101.0)
    assert peer.told()[-1][1]["after_s"] == 1.0


def test_a_restarted_engine_tells_and_counts_its_pause_but_not_the_way():
    peer = Peer()
    peer.timeline.staged(ONE, 10.0)
    peer.look(11.0, commits=1, report=CommitReport(0.1), ready=True, committed="0.1")
    peer.look(500.0, commits=1, report=CommitReport(0.1), error="restarted")
    peer.look(510.0, commits=2, report=CommitReport(4.0), ready=True, committed="0.1")
    assert peer.kinds() == ["staged", "committed", "ready", "unready", "committed", "ready"]
    assert peer.told()[3] == ("unready", {"engine": "e", "version": None, "why": "restarted"})
    assert peer.value("p2pcast_peer_staged_to_live_seconds_count") == 1
    assert peer.value("p2pcast_peer_commit_pause_seconds_sum") == 4.1


def test_a_failure_is_told_once_as_long_as_its_reason_stays():
    peer = Peer()
    for now in (1.0, 3.0, 5.0):
        peer.look(now, fault="is the server up?", staged="0.1")
    peer.look(7.0, fault="rank 1: no room")
    peer.look(9.0)
    peer.look(11.0, fault="rank 1: no room")
    assert peer.kinds() == ["install_failed"] * 3
    assert peer.told()[0][1] == {"engine": "e", "version": "0.1", "why": "is the server up?"}
    assert peer.value("p2pcast_peer_refused_installs_total") == 3


def test_a_commit_that_is_not_known_to_be_right_is_none():
    """The audit failed: the row names no version."""
    peer = Peer()
    peer.look(1.0, commits=1, report=CommitReport(0.1), fault="2 tensors differ")
    assert peer.kinds() == ["install_failed"]


def test_refusals_parents_and_the_hub():
    peer = Peer()
    peer.timeline.refused(TWO, "bad cell")
    peer.timeline.attached(None)
    peer.timeline.attached(b"\1" * 16)
    peer.timeline.attached(b"\1" * 16)
    peer.timeline.hub(reachable=False)
    peer.timeline.hub(reachable=True)
    assert peer.told() == [
        ("refused", {"version": "0.2", "why": "bad cell"}),
        ("parent", {"parent": "01" * 16}),
        ("hub_lost", {}),
        ("hub_back", {}),
    ]
    assert peer.value("p2pcast_peer_refused_versions_total") == 1
