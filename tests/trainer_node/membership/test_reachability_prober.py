"""Where peers say that they are, where they are seen, and whether the hub gets in there."""

from __future__ import annotations

import asyncio
import socket

import pytest

from p2pcast.transport.link import QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Join
from tests.support.until import until
from topology.reachability import Contact, Reach
from trainer_node.membership import reachability_prober as module
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.reachability_prober import ReachabilityProber, note_addresses, whereabouts

TOKEN = JoinToken(bytes(16), bytes(20))
HUB, PEER = (Identity(bytes([n]) * 16, f"node-{n}", TOKEN) for n in (1, 2))


def join(listen, ways=None, families=None) -> Join:
    return Join("p", "", listen, held=None, engine=None, ways=ways, families=families)


def test_only_advertised_addresses_count() -> None:
    body = join(("peer.example", 7), [("peer.example", 7), ("2001:db8::7", 7)], [6])
    ways, families = whereabouts(body, "203.0.113.9")
    assert ways == (Contact(("peer.example", 7)), Contact(("2001:db8::7", 7), 6))
    assert families == (4, 6), "it has come here by IPv4"


def test_without_advertised_addresses_the_seen_and_own_addresses_count() -> None:
    body = join(("", 7), [("192.168.1.5", 7), ("203.0.113.9", 7), ("fd00::5", 7)], [4])
    ways, families = whereabouts(body, "203.0.113.9")
    assert ways == (
        Contact(("203.0.113.9", 7), 4),
        Contact(("192.168.1.5", 7), 4, own=True),
        Contact(("fd00::5", 7), 6, own=True),
    )
    assert families == (4,)


def test_a_peer_that_reports_no_families_counts_as_having_both() -> None:
    ways, families = whereabouts(join(("", 7)), "127.0.0.1")
    assert ways == (Contact(("127.0.0.1", 7), 4, loopback=True),)
    assert families == (4, 6)
    assert whereabouts(join(("", 7)), "fe80::1%eth0")[0] == (), "that means something on one host alone"


class NoOwner(QuietOwner):
    def accept_link(self, link, hello) -> None:
        link.owner = self


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_peers_are_dialled_back(host) -> None:
    reach, changed = Reach(), asyncio.Event()
    lookout = ReachabilityProber(reach, HUB, None)
    lookout.changed.add(changed.set)
    running = asyncio.create_task(lookout.run())
    listener = Listener(NoOwner(), PEER)
    await listener.start(host, 0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = unused.getsockname()[:2]
        reach.join(PEER.node.hex(), host, [Contact(closed, 4), Contact(listener.address)])
        reach.join("00" * 16, "elsewhere", [Contact(listener.address)])
        for ident in (PEER.node.hex(), "00" * 16):
            lookout.probe(ident)
        async with asyncio.timeout(600):
            await changed.wait()
            await until(
                lambda: None not in [a for ident in (PEER.node.hex(), "00" * 16) for _, a in reach.answers(ident)]
            )
    assert [answers for _, answers in reach.answers(PEER.node.hex())] == [False, True]
    assert reach.answers("00" * 16) == [(listener.address, False)], "another node answers there"
    assert reach.shut("00" * 16)
    assert not reach.shut(PEER.node.hex())
    running.cancel()
    await asyncio.wait([running])
    await listener.stop()


def newcomer(ident: str, n: int) -> PeerRecord:
    peer = PeerRecord(ident, ident, "", f"203.0.113.{n}", 7, 0.0)
    note_addresses(peer, join(("", 7)), f"203.0.113.{n}")
    return peer


def test_plans_follow_probe_results() -> None:
    """Two of four peers accept no connections: once known, no plan puts one below the other."""
    members = Membership(1, 100e6, chains=1)
    for n, ident in enumerate("abcd"):
        members.join(newcomer(ident, n), 0.0)
    assert members.plan.chains == (("a", "b", "c", "d"),)
    for n, ident in enumerate("abcd"):
        members.reach.answered(ident, (f"203.0.113.{n}", 7), ident in "ad")
    epoch = members.plan.epoch
    assert members.reach_changed(1.0)
    assert members.plan.epoch > epoch
    assert members.plan.parent["c"] == "a", "beside b, which is a's child"
    assert not members.reach_changed(1.0)
    members.join(newcomer("e", 9), 2.0)
    above = members.plan.parent["e"]
    assert above in "bd", "the highest tail; nothing is known of it yet"
    members.reach.unreached("e", above, 3.0)
    members.reach.unreached(above, "e", 3.0)
    assert members.reach_changed(3.0)
    assert members.plan.parent["e"] != above
    for n in range(4, 9):
        members.replan(float(n))
        assert all(a == "" or members.reach.links(a, p, n) for p, a in members.plan.parent.items())


async def test_an_error_of_a_dial_ends_no_other_dial(monkeypatch, caplog) -> None:
    reach, dialled, done = Reach(), [], asyncio.Event()
    lookout = ReachabilityProber(reach, HUB, None)
    odd, good = ("odd.example", 1), ("127.0.0.1", 2)

    async def probe(address, *_):
        dialled.append(address)
        if address == odd:
            raise UnicodeError("label too long")
        done.set()
        return True

    monkeypatch.setattr(module, "dial_probe", probe)
    reach.join("aa" * 16, "there", [Contact(odd), Contact(good, 4)])
    running = asyncio.create_task(lookout.run())
    lookout.probe("aa" * 16)
    async with asyncio.timeout(600):
        await done.wait()
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])
    assert set(dialled) == {odd, good}
    assert dict(reach.answers("aa" * 16)) == {odd: False, good: True}
    assert "dialling a peer back at odd.example:1" in caplog.text


async def test_replaced_addresses_of_a_peer_are_not_dialled() -> None:
    """A peer that joins repeatedly, each time at other addresses, has at most eight addresses in the queue."""
    reach = Reach()
    lookout = ReachabilityProber(reach, HUB, None)
    for n in range(100):
        reach.join("aa" * 16, "there", [Contact((f"h{n}-{way}.example", 1)) for way in range(8)])
        lookout.probe("aa" * 16)
    assert sum(map(len, lookout._due.values())) == 8
