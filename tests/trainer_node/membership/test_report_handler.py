"""Effects of a report on the peer's record and on the parts that follow it."""

from __future__ import annotations

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
