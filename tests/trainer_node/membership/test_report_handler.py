"""Effects of a report on the peer's record and on the parts that follow it. Artifacts in reports: held, lacking,
corrupt, and wrong on the mirror.
"""

from __future__ import annotations

from parts import emitted, ident, node
from recorded_fleet import REPORT, Fleet

from p2pcast.ground.version import Version
from p2pcast.wire.messages import Type

V = Version


async def test_a_report_updates_the_peer_and_its_dependents(fleet: Fleet) -> None:
    link = fleet.join("a")
    link.hears(
        Type.REPORT,
        **REPORT
        | {"staged": V(0, 1), "committed": V(0, 1), "durable": [b"d"], "opened": [b"o"], "transfer": [4096, 10]},
    )
    peer = fleet.peer("a")
    assert (peer.staged, peer.committed, peer.transfers.good) == (V(0, 1), V(0, 1), 1)
    assert fleet.recall.calls[-1] == ("learn", "a", [b"d"], [b"o"])
    assert fleet.reported == ["a"]
    assert fleet.changes == 1


async def test_invalid_values_are_counted_and_reported_once_a_session(fleet: Fleet, caplog) -> None:
    link = fleet.join("a")
    for _ in range(2):
        link.hears(Type.REPORT, ("engines", "cores"), **REPORT)
    assert fleet.reports.invalid_reports == 2
    assert caplog.text.count("invalid values") == 1


async def test_only_artifacts_of_the_run_are_remembered(fleet: Fleet) -> None:
    link = fleet.join("a")
    link.hears(Type.REPORT, **REPORT | {"held": [b"artifact", b"foreign"]})
    assert fleet.sources._held[ident("a")] == {b"artifact"}
    link.hears(Type.REPORT, **REPORT | {"dropped": [b"artifact"]})
    assert fleet.sources._held[ident("a")] == set()


async def test_missing_artifacts_count_only_once_sealed(fleet: Fleet) -> None:
    link, lacking = fleet.join("a"), []
    fleet.membership.note_lacking = lambda witness, rows, now: lacking.append(list(rows))  # type: ignore[method-assign]
    link.hears(Type.REPORT, **REPORT | {"lacking": [[b"sealed", node("b")], [b"sealed", None], [b"other", node("b")]]})
    assert lacking == [[(b"sealed", ident("b")), (b"sealed", None)]]


async def test_evictions_wrong_objects_and_garbage_are_passed_on(fleet: Fleet) -> None:
    first, link = fleet.join("b"), fleet.join("a")
    link.hears(Type.REPORT, **REPORT | {"evicted": [b"signed"], "spoilt": ["ready/1"], "garbled": [[node("b"), 30]]})
    assert fleet.trust.learnt == [b"signed"]
    assert fleet.wrong == ["ready/1"]
    assert [e["peer"] for e in emitted(fleet.events, "garbled")] == ["b"]
    assert not first.closed
