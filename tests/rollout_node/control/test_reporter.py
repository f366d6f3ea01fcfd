from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from types import SimpleNamespace

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.wire.messages import Report
from rollout_node.control import reporter as module
from rollout_node.control.reporter import MEASURABLE_BYTES, ReceivedArtifacts, Reporter, join_body

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def holding(ident, version=(0, 1), *, complete=True, durable=None):
    return SimpleNamespace(
        id=ident,
        completed_at=1.0 if complete else None,
        complete=complete,
        open=SimpleNamespace(version=Version(*version)),
        assembly=SimpleNamespace(open_signed=b"open" + ident, durable_signed=durable),
    )


class Peer:
    def __init__(self) -> None:
        self.hub = SimpleNamespace(joined_at=1.0)
        self.last = (5, 6)
        self.extra = {}
        self.node = SimpleNamespace(holdings={}, garbled=Counter())
        self.reporter = Reporter(
            self.node,
            SimpleNamespace(take_last=lambda: self.last),
            self.hub,
            self.status,
            **{key: partial(self.extra.get, key, []) for key in ("evicted", "lacking", "spoilt")},
        )

    def status(self, transfer, changes) -> Report:
        return Report(None, None, None, transfer=transfer, **dataclasses.asdict(changes))

    def hold(self, *holdings) -> None:
        self.node.holdings = {h.id: h for h in holdings}


def test_a_report_states_the_present_and_the_last_transfer():
    assert Peer().reporter.report() == Report(None, None, None, transfer=(5, 6))


def test_the_first_report_on_a_connection_lists_all_that_is_held():
    peer = Peer()
    peer.hold(holding(B), holding(A), holding(C, complete=False))
    assert peer.reporter.report().held == [A, B]
    assert peer.reporter.report().held is None
    peer.hub.joined_at = 2.0
    assert peer.reporter.report().held == [A, B]


def test_later_reports_list_changes():
    peer = Peer()
    peer.hold(holding(A))
    peer.reporter.report()
    peer.hold(holding(B))
    report = peer.reporter.report()
    assert (report.held, report.dropped) == ([B], [A])


def test_a_long_list_is_spread_over_reports(monkeypatch):
    monkeypatch.setattr(limits, "MAX_HELD", 1)
    peer = Peer()
    peer.hold(holding(A), holding(B))
    assert [peer.reporter.report().held for _ in range(3)] == [[A], [B], None]


def test_the_first_report_on_a_connection_proves_the_newest_versions():
    peer = Peer()
    peer.hold(holding(A, (0, 1), durable=b"da"), holding(B, (0, 3)), holding(C, (0, 2), durable=b"dc"))
    report = peer.reporter.report()
    assert report.opened == [b"open" + x for x in (B, C, A)]
    assert report.durable == [b"dc", b"da"]
    assert peer.reporter.report().opened is None


def test_complaints_are_sent_while_there_are_any():
    peer = Peer()
    peer.node.garbled[A] = 3
    assert peer.reporter.report().lacking is None
    peer.extra.update(lacking=[(B, None)], evicted=[b"signed"], spoilt=["name"])
    report = peer.reporter.report()
    assert (report.garbled, report.lacking) == ([(A, 3)], [(B, None)])
    assert (report.evicted, report.spoilt) == ([b"signed"], ["name"])


def body(monkeypatch, own=("10.0.0.1",), **changes):
    monkeypatch.setattr(module, "own_hosts", lambda: list(own))
    given = {
        "listen": ("", 0),
        "advertise": (),
        "port": 7,
        "own_host": "10.0.0.9",
        "staged": None,
        "engine": None,
    } | changes
    return join_body("a", "r", **given)


def test_join_names_every_address_of_the_machine(monkeypatch):
    said = body(monkeypatch)
    assert said.ways == [("10.0.0.9", 7), ("10.0.0.1", 7)]
    assert (said.name, said.region, said.listen, said.held) == ("a", "r", ("", 7), None)
    assert said.families


def test_join_names_the_advertised_addresses(monkeypatch):
    said = body(monkeypatch, advertise=(("example.org", 9), ("::1", 8)))
    assert said.listen == ("example.org", 9)
    assert said.ways == (("example.org", 9), ("::1", 8))


def test_join_names_the_staged_version(monkeypatch):
    assert body(monkeypatch, staged=Version(1, 2)).held == Version(1, 2)


def test_the_last_transfer_is_taken_once():
    transfers = ReceivedArtifacts()
    assert transfers.take_last() is None
    transfers.received(1000, 0.5)
    transfers.received(2000, 0.25)
    assert transfers.take_last() == (2000, 250_000)
    assert transfers.take_last() is None


def test_the_fastest_transfer_that_is_long_enough_counts():
    transfers = ReceivedArtifacts()
    transfers.received(MEASURABLE_BYTES, 0.001)
    assert transfers.fastest_bps == 0.0
    transfers.received(2 * MEASURABLE_BYTES, 1.0)
    transfers.received(2 * MEASURABLE_BYTES, 2.0)
    assert transfers.fastest_bps == 16 * MEASURABLE_BYTES
