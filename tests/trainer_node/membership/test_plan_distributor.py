"""The hub's messages to peers about other peers: over recorded links, without a hub."""

from __future__ import annotations

import asyncio
import string
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest
from parts import HUB, FakeLink, emitted, ident, node

from p2pcast.process.events import Events
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Type
from tests.support.until import until
from topology.blame import CREDIBLE, FORGIVEN_S
from topology.pull_sources import PullSources
from topology.reachability import Contact
from topology.slow_peers import SUSTAINED
from topology.withholding import GRACE_S
from trainer_node.membership import reachability_prober
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.membership import RATED_BYTES, Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, Sessions
from trainer_node.membership.plan_distributor import PlanDistributor
from trainer_node.membership.plan_upkeep import PlanUpkeep
from trainer_node.membership.reachability_prober import ReachabilityProber

IDENTITY = Identity(HUB, "hub", JoinToken(bytes(16), bytes(20)))
UPLINK_BPS = 100e6
ARTIFACT, OTHER = b"v" * 16, b"w" * 16
KNOWN, NO_BROADCASTS = {ARTIFACT}, cast(BroadcastPlanner, None)


def address(name: str, way: int = 0) -> tuple[str, int]:
    """Each peer has two addresses."""
    return f"{name}{way}.example", 7


def place(name: str) -> list[Any]:
    return [node(name), "192.0.2.1", 7]


def letters(idents: Iterable[str]) -> str:
    """The peers' names, in one word."""
    return "".join(bytes.fromhex(i).decode()[:1] for i in idents)


class Fleet:
    """Peers with one-letter names, each at a site of its own, that have been told of their places."""

    def __init__(self, names: str, chains: int = 1, regions: dict[str, str] | None = None) -> None:
        self.events, self.sessions, self.sources = Events(), Sessions(), PullSources()
        self.membership = Membership(1, UPLINK_BPS, chains)
        self.reach = self.membership.reach
        self.links: dict[str, FakeLink] = {}
        for name in names:
            self.join(name, (regions or {}).get(name, ""))
        timeline, prober = FleetTimeline(self.events), ReachabilityProber(self.reach, IDENTITY, None)
        self.plans = PlanDistributor(self.membership, self.sessions, timeline, prober, self.sources, KNOWN.__contains__)
        self.upkeep = PlanUpkeep(HUB, self.membership, self.plans, NO_BROADCASTS, self.events)
        self.plans.send_plans()
        self.first = {name: link.sent for name, link in self.links.items()}
        """Peer → its first messages."""
        self.forget_messages()

    def forget_messages(self) -> None:
        for link in self.links.values():
            link.sent = []

    def join(self, name: str, region: str = "") -> None:
        peer = PeerRecord(ident(name), name, region, "192.0.2.1", 7, 0.0, site=name)
        peer.ways = tuple(Contact(address(name, way), 4) for way in range(2))
        self.membership.join(peer, 0.0)
        self._begin_session(name, peer)

    def leave(self, name: str) -> None:
        self.membership.leave(ident(name), 1.0)
        del self.sessions[ident(name)]

    def _begin_session(self, name: str, peer: PeerRecord) -> None:
        self.links[name] = FakeLink(name)
        session = PeerSession(self.links[name], None)  # type: ignore[arg-type]
        session.peer = peer
        self.sessions[ident(name)] = session

    def planned_by(self) -> str:
        """Peers that ``send_plans`` examines now. Each has a new session and is sent its plan, whether new or not."""
        for peer in self.membership.peers.values():
            self._begin_session(peer.name, peer)
        self.plans.send_plans()
        return "".join(name for name, link in self.links.items() if Type.PLAN in link.kinds())

    def unlink(self, name: str, other: str) -> None:
        """Neither of two peers has reached the other."""
        for dialler, peer in ((name, other), (other, name)):
            self.reach.unreached(ident(dialler), ident(peer), time.monotonic())

    def shut(self, name: str) -> None:
        """The peer answers the hub nowhere; another peer does."""
        other = next(n for n in self.links if n != name)
        self.reach.answered(ident(other), address(other), True)
        for way in range(2):
            self.reach.answered(ident(name), address(name, way), False)
        assert self.reach.shut(ident(name))

    def call(self, name: str, target: str) -> None:
        self.plans.on_dial_request(self.sessions[ident(name)], messages.Call(node(target), stripes=3))

    def seek(self, name: str, artifact: bytes = ARTIFACT, without: str = "") -> str:
        """Names of the peers in the answer."""
        self.plans.on_source_request(
            self.sessions[ident(name)], messages.FindSources(artifact, [node(other) for other in without])
        )
        [(_, ways), (_, sources)] = self.links[name].sent
        self.links[name].sent = []
        assert sources["artifact"] == artifact
        assert [row[0] for row in ways["peers"]] == [row[0] for row in sources["peers"]]
        return letters(row[0].hex() for row in sources["peers"])

    def hold(self, names: str, artifact: bytes = ARTIFACT) -> None:
        for name in names:
            self.sources.holds(ident(name), [artifact])

    def report_garbled(self, witness: str, blamed: str, pieces: int = 1, now: float = 1.0) -> None:
        self.upkeep.note_garbled(self.membership.peers[ident(witness)], [(node(n), pieces) for n in blamed], now)

    def verdicts(self, kind: str) -> list[tuple[str, str, bool]]:
        """Witness, blamed peer, and whether the verdict is permanent."""
        return [(e["witness"], e["peer"], e["quarantined"]) for e in emitted(self.events, kind)]

    def feeders(self) -> str:
        return letters(dict.fromkeys(above for above in self.membership.plan.parent.values() if above))


@pytest.fixture
async def chain() -> Fleet:
    """a feeds b, and b feeds c."""
    return Fleet("abc")


@pytest.fixture
async def two_chains() -> Fleet:
    """a feeds c, and c feeds e; b feeds d, and d feeds f."""
    return Fleet("abcdef", chains=2)


# -- plans, routes and neighbours


async def test_a_peer_is_told_its_parent_its_backups_and_their_addresses(chain):
    plan = {"epoch": [1, 3], "backups": [], "host": "", "port": 0, "parent": None}
    assert chain.first["a"] == [(Type.PLAN, plan)]
    [(ways, routes), (kind, plan)] = chain.first["c"]
    assert (ways, kind) == (Type.ADDRESSES, Type.PLAN)
    addresses = {name: [list(address(name, way)) for way in range(2)] for name in "ab"}
    assert routes["peers"] == [[node("b"), True, addresses["b"]], [node("a"), True, addresses["a"]]]
    assert [plan["parent"], plan["host"], plan["port"]] == place("b")
    assert plan["backups"] == [place("a")]


async def test_no_plan_is_sent_twice(chain):
    chain.plans.send_plans()
    assert all(link.sent == [] for link in chain.links.values())


async def test_a_change_is_sent_to_nearby_peers_alone():
    fleet = Fleet(string.ascii_letters)
    assert fleet.planned_by() == ""
    fleet.leave("V")
    assert fleet.planned_by() == "WXYZ"
    fleet.join("!")
    assert fleet.planned_by() == "!"


async def test_a_change_of_reachability_is_sent_to_all_peers():
    fleet = Fleet(string.ascii_letters)
    fleet.reach.unreached(ident("c"), ident("b"), time.monotonic())
    assert fleet.planned_by() == string.ascii_letters
    assert fleet.planned_by() == string.ascii_letters, "a failed attempt is forgotten after a time"
    fleet.reach.reached(ident("c"), ident("b"))
    assert fleet.planned_by() == string.ascii_letters
    assert fleet.planned_by() == ""


async def test_moves_are_recorded_by_name(chain):
    chain.leave("b")
    chain.plans.send_plans()
    assert emitted(chain.events, "plan")[-1]["moved"] == [["c", "a"]]
    chain.leave("a")
    chain.plans.send_plans()
    assert emitted(chain.events, "plan")[-1]["moved"] == [["c", "hub"]]


async def test_only_new_routes_are_sent(chain):
    chain.reach.answered(ident("b"), address("b"), False)
    chain.plans.send_plans()
    row = [node("b"), True, [list(address("b", 1)), list(address("b", 0))]]
    assert chain.links["c"].sent == [(Type.ADDRESSES, {"peers": [row]})]
    assert not chain.links["a"].sent
    assert not chain.links["b"].sent


async def test_an_expected_answer_of_a_peer_is_no_news(chain):
    chain.reach.unreached(ident("a"), ident("c"), time.monotonic())
    chain.plans.send_plans()
    turn = chain.reach.turn
    chain.forget_messages()
    chain.reach.answered(ident("b"), address("b", 1), True)
    assert chain.reach.ways(ident("c"), ident("b")) == [address("b", 1), address("b", 0)]
    chain.plans.send_plans()
    assert chain.reach.turn == turn
    assert all(link.sent == [] for link in chain.links.values())


async def test_neighbours_can_be_dialled_and_backups_can_be_linked(two_chains):
    [neighbours] = [body["peers"] for kind, body in two_chains.first["e"] if kind is Type.NEIGHBOURS]
    assert neighbours == [place("b"), place("d"), place("f")]
    two_chains.shut("b")
    two_chains.plans.send_plans()
    [(kind, told)] = two_chains.links["e"].sent
    assert (kind, told["peers"]) == (Type.NEIGHBOURS, [place("d"), place("f")])
    # f stays below b, which can dial f.
    [(kind, told)] = two_chains.links["f"].sent
    assert (kind, [row[:2] for row in told["peers"]]) == (Type.ADDRESSES, [[node("b"), False]])
    two_chains.unlink("b", "f")
    two_chains.plans.send_plans()
    assert [body["backups"] for body in two_chains.links["f"].bodies(Type.PLAN)] == [[]]


# -- reachability


async def test_a_parent_is_asked_to_dial_a_child_that_cannot_reach_the_parent(chain):
    chain.call("c", "b")
    ways = [list(address("c", way)) for way in range(2)]
    assert chain.links["b"].sent == [(Type.CALLED, {"node": node("c"), "stripes": 3, "ways": ways})]
    assert not chain.links["c"].sent


async def test_an_unknown_peer_cannot_be_dialled(chain):
    chain.call("c", "x")
    assert chain.links["c"].sent == [(Type.UNREACHABLE, {"node": node("x")})]


async def test_a_peer_without_addresses_cannot_be_dialled(chain):
    chain.reach.join(ident("c"), "c", [])
    chain.call("c", "b")
    assert chain.links["c"].sent == [(Type.UNREACHABLE, {"node": node("b")})]
    assert not chain.links["b"].sent


@pytest.fixture
def dialled(monkeypatch) -> list[tuple[str, int]]:
    """Addresses that the hub has dialled back; no dial ends."""
    found: list[tuple[str, int]] = []

    async def probe(address, *_) -> None:
        found.append(address)
        await asyncio.Event().wait()

    monkeypatch.setattr(reachability_prober, "dial_probe", probe)
    return found


@pytest.fixture
async def probed(chain, dialled) -> AsyncIterator[Fleet]:
    """A chain whose prober runs and has dialled a."""
    running = asyncio.create_task(chain.plans.prober.run())
    chain.plans.prober.probe(ident("a"))
    await until(lambda: len(dialled) == 2)
    yield chain
    running.cancel()
    await asyncio.wait([running])


async def test_a_peer_that_was_not_reached_is_told_and_dialled_back(probed, dialled):
    probed.plans.on_unreachable(probed.sessions[ident("c")], node("b"))
    assert probed.links["b"].sent == [(Type.UNREACHABLE, {"node": node("c")})]
    assert not probed.reach.dials(ident("c"), ident("b"), time.monotonic())
    await until(lambda: set(dialled) >= {address("b", 0), address("b", 1)})
    assert probed.membership.plan.parent[ident("c")] == ident("b"), "b can dial c"


async def test_two_peers_that_did_not_reach_each_other_get_other_places(probed):
    probed.plans.on_unreachable(probed.sessions[ident("c")], node("b"))
    probed.plans.on_unreachable(probed.sessions[ident("b")], node("c"))
    await until(lambda: Type.PLAN in probed.links["c"].kinds())
    assert probed.membership.plan.parent[ident("c")] == ident("a")


async def test_an_unknown_peer_that_was_not_reached_is_ignored(probed, dialled):
    turn = probed.reach.turn
    probed.plans.on_unreachable(probed.sessions[ident("c")], node("x"))
    probed.plans.prober.probe(ident("b"))
    await until(lambda: len(dialled) == 4)
    assert set(dialled) == {address(name, way) for name in "ab" for way in range(2)}
    assert all(link.sent == [] for link in probed.links.values())
    assert probed.reach.turn == turn


@pytest.mark.parametrize(("dialled_by", "dialler"), [("parent", "b"), ("child", "c"), (None, "c")])
async def test_a_reported_link_proves_that_one_peer_dials_the_other(chain, dialled_by, dialler):
    chain.unlink("b", "c")
    peer = chain.membership.peers[ident("c")]
    peer.report = messages.Report(
        None, None, None, transfer=None, inflow=None, link={"dialled_by": dialled_by}, progress=None, error=None
    )
    chain.plans.note_link(peer, ident("b"))
    pairs = [("b", "c"), ("c", "b")]
    now = time.monotonic()
    assert [a for a, b in pairs if chain.reach.dials(ident(a), ident(b), now)] == [dialler]


# -- sources


async def test_sources_in_the_same_region_come_first():
    fleet = Fleet("abcd", regions={"a": "far", "b": "near", "c": "far", "d": "near"})
    fleet.hold("abc")
    assert fleet.seek("d") == "bac"


async def test_a_source_is_told_with_its_address_and_routes(chain):
    chain.hold("a")
    chain.plans.on_source_request(chain.sessions[ident("c")], messages.FindSources(ARTIFACT, []))
    assert chain.links["c"].sent == [
        (Type.ADDRESSES, {"peers": [[node("a"), True, [list(address("a", way)) for way in range(2)]]]}),
        (Type.SOURCES, {"artifact": ARTIFACT, "peers": [place("a")]}),
    ]


async def test_peers_that_the_seeker_excludes_are_no_sources():
    fleet = Fleet("abcd")
    fleet.hold("abc")
    assert fleet.seek("d", without="ac") == "b"


async def test_a_muted_peer_is_no_source():
    fleet = Fleet("abcd")
    fleet.hold("ab")
    fleet.report_garbled("c", "b", now=time.monotonic())
    fleet.links["d"].sent = []
    assert fleet.seek("d") == "a"


async def test_a_detached_peer_is_no_source():
    fleet = Fleet("abcd")
    fleet.hold("ad")
    for _ in range(SUSTAINED):
        fleet.membership.begin_version()
        for name, mbit in zip("abcd", (100, 100, 100, 10), strict=True):
            fleet.membership.note_transfer(ident(name), 1.0, RATED_BYTES, 8 * RATED_BYTES / (mbit * 1e6))
        fleet.membership.replan(2.0)
    assert letters(fleet.membership.detached) == "d"
    assert fleet.seek("b") == "a"


async def test_a_peer_that_cannot_be_linked_is_no_source():
    fleet = Fleet("abcd")
    fleet.hold("abc")
    fleet.unlink("a", "d")
    fleet.reach.unreached(ident("d"), ident("b"), time.monotonic())
    assert fleet.seek("d") == "bc", "b can dial d"


async def test_a_request_for_an_unknown_artifact_is_answered_and_not_remembered(chain, monkeypatch):
    chain.hold("a", OTHER)
    assert chain.seek("b", OTHER) == ""
    monkeypatch.setattr(chain.plans, "knows", lambda artifact: True)
    assert chain.seek("c", OTHER) == "a", "b does not count as a peer that will have parts"
    assert chain.seek("b", OTHER) == "ac"


# -- garbage


async def test_a_peer_that_sends_garbage_feeds_no_peer_and_each_verdict_is_reported_once(chain, caplog):
    for pieces in range(1, 50):
        chain.report_garbled("c", "b", pieces)
    assert chain.verdicts("garbled") == [("c", "b", False)]
    assert [e["node"] for e in emitted(chain.events, "garbled")] == [ident("b")]
    assert chain.feeders() == "ac"
    assert Type.PLAN in chain.links["c"].kinds()
    for pieces in range(1, 50):
        chain.report_garbled("a", "b", pieces, 2.0)
    assert chain.verdicts("garbled") == [("c", "b", False), ("a", "b", True)]
    assert [text.split(": ")[-1] for text in caplog.messages] == [
        "it feeds no other peer for a while",
        "it feeds no other peer any more",
    ]


async def test_a_forgiven_peer_is_reported_again(chain):
    chain.report_garbled("c", "b", 1)
    chain.report_garbled("c", "b", 2, FORGIVEN_S)
    assert len(chain.verdicts("garbled")) == 1
    chain.report_garbled("c", "b", 3, 3.0 * FORGIVEN_S)
    assert chain.verdicts("garbled") == [("c", "b", False)] * 2


async def test_a_quarantined_peer_is_not_reported_again():
    fleet = Fleet("abcd")
    for witness in "bcd":
        fleet.report_garbled(witness, "a", now=1.0)
    fleet.report_garbled("d", "a", 2, 10.0 * FORGIVEN_S)
    assert fleet.verdicts("garbled") == [("b", "a", False), ("c", "a", True)]


async def test_a_witness_that_blames_itself_or_departed_peers_moves_no_peer(chain):
    chain.report_garbled("c", "cx")
    assert chain.verdicts("garbled") == []
    assert all(link.sent == [] for link in chain.links.values())


async def test_a_witness_alone_demotes_few_peers_at_a_time():
    fleet = Fleet("abcdef")
    fleet.report_garbled("f", "abcdef"[: CREDIBLE + 1])
    assert fleet.verdicts("garbled") == [("f", name, False) for name in "abcdef"[:CREDIBLE]]
    assert fleet.feeders() == "def"


async def test_the_fourth_liar_of_one_witness_is_demoted_once_there_is_room():
    """The witness repeats its report with each further one."""
    fleet = Fleet("abcdef")
    fleet.report_garbled("f", "abcd")
    assert "d" in fleet.feeders()
    fleet.report_garbled("f", "abcd", 1, FORGIVEN_S + 1.0)
    assert fleet.verdicts("garbled")[-1] == ("f", "d", False)
    assert "d" not in fleet.feeders()


# -- withholding


async def test_a_peer_that_withholds_feeds_no_peer_and_each_verdict_is_reported_once(chain, caplog):
    chain.join("d")
    chain.plans.send_plans()
    chain.membership.peers[ident("d")].sent_epoch = chain.membership.plan.epoch
    assert chain.membership.note_parent(ident("d"), ident("b"), chain.membership.plan.epoch)
    chain.membership.note_lacking(ident("c"), [(ARTIFACT, ident("b"))], 1.0)
    chain.membership.note_lacking(ident("d"), [(OTHER, ident("b"))], 2.0)
    chain.plans.send_plans()
    chain.forget_messages()
    chain.upkeep.judge_withholding(1.0)
    assert chain.verdicts("withheld") == []
    assert all(link.sent == [] for link in chain.links.values())
    for _ in range(2):
        chain.upkeep.judge_withholding(1.0 + GRACE_S)
    assert chain.verdicts("withheld") == [("c", "b", False)]
    assert [e["node"] for e in emitted(chain.events, "withheld")] == [ident("b")]
    assert "b" not in chain.feeders()
    assert any(link.bodies(Type.PLAN) for link in chain.links.values())
    chain.upkeep.judge_withholding(2.0 + GRACE_S)
    assert chain.verdicts("withheld") == [("c", "b", False), ("d", "b", True)]
    assert [text.split(": ")[-1] for text in caplog.messages] == [
        "it feeds no other peer for a while",
        "it feeds no other peer any more",
    ]


async def test_a_departed_witness_is_reported_by_its_node(chain):
    chain.membership.note_lacking(ident("c"), [(ARTIFACT, ident("b"))], 1.0)
    chain.leave("c")
    chain.upkeep.judge_withholding(1.0 + GRACE_S)
    assert chain.verdicts("withheld") == [(ident("c"), "b", False)]
