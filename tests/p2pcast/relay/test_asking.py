"""What a source makes of those who pull from it: they get what they ask for, once, and no faster than it suits a version on its way."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast import limits
from p2pcast.artifact import Assembly
from p2pcast.errors import RemoteError
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.feed import ChildFeeds, Do
from p2pcast.relay.node import Node
from p2pcast.relay.pieces import PieceSet, indices_of, ranges_of
from p2pcast.relay.source import Source
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.link import Link
from p2pcast.wire.connection import Message, Piece
from p2pcast.wire.messages import Type

PIECE = 1024


@given(st.sets(st.integers(0, 300)), st.integers(0, 400))
def test_ranges_and_back(pieces, most):
    ordered = sorted(pieces)
    assert indices_of(ranges_of(ordered), most) == ordered[:most]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_what_is_asked_for_is_sent_once_and_nothing_else(maker, seed, apart):
    draw = random.Random(seed)
    made = maker.make([3000] * draw.randint(1, 20), piece=PIECE, seed=seed)
    artifact = maker.artifact(made)
    count = artifact.assembly.pieces
    gaps = {i for i in range(count) if draw.random() < 0.2}
    artifact.held = PieceSet()
    for index in sorted(set(range(count)) - gaps):
        artifact.held.add(index)
    feeds = ChildFeeds()
    feeds.apart = apart
    readers: dict[int, Assembly] = {}
    sent: list[int] = []
    left, owed, seals = list(range(count)), set(), 0
    draw.shuffle(left)
    feeds.ask(artifact, [], seal=True)
    while left or owed or not seals:
        step = draw.random()
        if step < 0.3 and left:
            some, left = left[: draw.randint(1, 9)], left[9:]
            unheld = feeds.ask(artifact, some, seal=False)
            assert set(unheld) == set(some) & gaps
            owed |= set(some) - gaps
        elif step < 0.4 and owed:
            back = feeds.recall(artifact.id, ranges_of(sorted(draw.sample(sorted(owed), draw.randint(1, len(owed))))))
            assert set(back) <= owed
            owed -= set(back)
        else:
            stripe = draw.randint(0, 2)
            for send in feeds.next(stripe):
                assert send.what is not Do.LAYOUT or stripe not in readers
                if send.what is Do.OPEN:
                    readers[stripe] = Assembly(send.signed, maker.key.public, maker.layout)
                elif send.what is Do.BATCH:
                    readers[stripe].add_batch(send.signed)
                elif send.what is Do.SEAL:
                    readers[stripe].add_manifest(send.signed)
                    seals += 1
                    assert stripe == 0
                elif send.what is Do.PIECE:
                    assert readers[stripe].piece_hash(send.index) is not None, "its batch came first, on this stripe"
                    assert not (apart and stripe == 0)
                    owed.remove(send.index)
                    sent.append(send.index)
    assert len(sent) == len(set(sent))
    assert seals == 1
    assert not feeds.pushing


def test_asking_has_its_limits(maker):
    artifact = maker.artifact(maker.make([3000] * 4, piece=PIECE))
    feeds = ChildFeeds()
    feeds.ask(artifact, [0] * limits.MAX_ASKED, seal=False)
    with pytest.raises(RemoteError, match="at once"):
        feeds.ask(artifact, [0], seal=False)
    pushed = ChildFeeds()
    pushed.add(artifact, [], live=True)
    with pytest.raises(RemoteError, match="sent whole"):
        pushed.ask(artifact, [0], seal=False)
    assert pushed.recall(artifact.id, [0, 1 << 20]) == []


# -- the shell


class Paced:
    """A stripe that takes nothing, and remembers how fast it may send."""

    writable = False
    socket = None
    acked_bytes = 0
    rate: int | None = None

    def pace(self, rate: int | None) -> None:
        self.rate = rate

    def close(self, error=None) -> None: ...

    def info(self):
        return None


class Heard(Link):
    def __init__(self, owner, stripes: int = 1, node: bytes = b"r" * 16):
        super().__init__(owner, node, "remote", stripes)
        self.said: list[tuple[Type, dict]] = []
        self.stripes = {n: Paced() for n in range(stripes)}

    def send(self, kind, body, handle=0):
        self.said.append((kind, body))

    def heard(self, kind: Type) -> list[dict]:
        return [body for each, body in self.said if each is kind]


class Owner:
    def make_log(self, open_, layout):
        return None

    def on_opened(self, holding): ...
    def on_complete(self, holding): ...
    def on_offered(self, upstream): ...
    def on_upstream_lost(self, upstream, error): ...


@pytest.fixture
async def source(maker):
    node = Node(Owner(), b"c" * 16, maker.key.public)
    node.add_layout(maker.layout)
    Downstream(node, max_pulls=2)
    yield node
    node.disk.shutdown()


def tell(node: Node, link: Link, kind: Type, body: dict) -> None:
    node.downstream.on_link_event(link, None, Message(kind, body))


def attached(node: Node, *, live: bool, stripes: int = 3, remote: bytes = b"r" * 16) -> Heard:
    link = Heard(node.downstream, stripes, remote)
    node.downstream.accept(link)
    tell(node, link, Type.ATTACH, {"live": live, "layouts": [], "want": []})
    return link


def stored(maker, node: Node, step: int = 1) -> bytes:
    made = maker.make([5000] * 30, step=step, piece=PIECE)
    assembly = Assembly(made.open, maker.key.public, maker.layout)
    for batch in made.batches:
        assembly.add_batch(batch)
    assembly.add_manifest(made.manifest)
    return node.add_stored(assembly, None).id


async def test_it_says_what_it_has_and_then_what_has_come(source, maker):
    whole = stored(maker, source)
    coming = maker.make([5000] * 3, step=2, piece=PIECE)
    holding = source.open(coming.open, None)
    link = attached(source, live=False)
    tell(source, link, Type.ASK, {"artifact": whole, "pieces": [], "seal": False})
    tell(source, link, Type.ASK, {"artifact": coming.id, "pieces": [], "seal": False})
    tell(source, link, Type.ASK, {"artifact": b"x" * 16, "pieces": [], "seal": False})
    pieces = source.holdings[whole].assembly.pieces
    assert link.heard(Type.HAVE) == [
        {"artifact": whole, "pieces": [0, pieces], "sealed": True},
        {"artifact": coming.id, "pieces": [], "sealed": False},
    ]
    assert link.heard(Type.GONE) == [{"artifact": b"x" * 16}]
    tell(source, link, Type.ASK, {"artifact": coming.id, "pieces": [0, 2], "seal": False})
    assert link.heard(Type.UNSENT) == [{"artifact": coming.id, "pieces": [0, 2]}]
    for batch in coming.batches:
        holding.assembly.add_batch(batch)
    holding.artifact.offer(1, memoryview(coming.pieces(PIECE)[1]))
    assert not source.downstream.line_up(holding, 1), "nobody is sent it unasked"
    (child,) = source.downstream.children.values()
    assert child.feeds.get(coming.id).news == [1]


async def test_only_so_many_may_pull_and_children_by_plan_are_not_counted(source):
    live = attached(source, live=True)
    pulls = [attached(source, live=False, remote=bytes([n]) * 16) for n in range(3)]
    assert [link.closed for link in (live, *pulls)] == [False, False, False, True]


async def test_a_version_on_its_way_slows_pulling_but_not_messages(source, maker):
    whole = stored(maker, source)
    links = [attached(source, live=False) for _ in range(2)]
    for link in links:
        tell(source, link, Type.ASK, {"artifact": whole, "pieces": [0, 3], "seal": False})
    rates = lambda: [[stripe.rate for stripe in link.stripes.values()] for link in links]  # noqa: E731
    assert rates() == [[None] * 3] * 2
    coming = source.open(maker.make([5000] * 3, step=2, piece=PIECE).open, None)
    assert not source.busy, "nobody sends it yet"
    coming.source = Upstream(source, live=True)
    source.look()
    assert source.busy
    for fast, *slow in rates():
        assert fast is None
        assert all(rate is not None and rate > 0 for rate in slow)
    source.holdings.pop(coming.id)
    source.look()
    assert rates() == [[None] * 3] * 2
    tell(source, links[0], Type.EASE, {"bytes_s": 5000})
    assert rates() == [[None, 5000, 5000], [None] * 3]
    tell(source, links[0], Type.EASE, {"bytes_s": None})
    assert rates() == [[None] * 3] * 2


async def test_what_is_pulled_here_is_no_version_on_its_way(source, maker):
    class Puller:
        def owed(self, one):
            return False

    live = attached(source, live=True)
    made = maker.make([5000] * 3, step=2, piece=PIECE)
    source.pulled.add(made.id)
    one = Source(source, Puller())
    one.start(Heard(one))
    one.on_link_event(one.link, None, Message(Type.OPEN, {}, 1, made.open))
    assert made.id in source.holdings
    assert not source.busy
    assert not list(source.downstream.children[live].feeds), "nor is it pushed on"
    assert source.wants() == []


async def test_a_piece_that_nobody_asked_for_ends_the_link(source, maker):
    class Puller:
        def owed(self, one):
            return False

        def heard(self, one, size): ...

        def expects(self, one, artifact, piece):
            return False

    made = maker.make([5000] * 3, step=2, piece=PIECE)
    source.pulled.add(made.id)
    one = Source(source, Puller())
    one.start(Heard(one))
    one.on_link_event(one.link, None, Message(Type.OPEN, {}, 1, made.open))
    one.on_link_event(one.link, None, Message(Type.BATCH, {}, 1, made.batches[0]))
    one.on_link_event(one.link, None, Piece(1, 0, memoryview(made.pieces(PIECE)[0])))
    assert one.link.closed
    assert source.holdings[made.id].artifact.held.count == 0


@pytest.mark.parametrize("begun", [False, True])
async def test_a_parent_is_asked_not_to_push_what_will_be_pulled(source, maker, begun):
    link = attached(source, live=True)
    made = maker.make([5000] * 3, step=2, piece=PIECE)
    if begun:
        source.open(made.open, None)
    tell(source, link, Type.RECALL, {"artifact": made.id, "pieces": [0, limits.MAX_PIECES]})
    assert link.heard(Type.UNSENT) == [{"artifact": made.id, "pieces": [] if begun else [0, limits.MAX_PIECES]}]
    source.open(made.open, None)
    assert bool(list(source.downstream.children[link].feeds)) is begun


async def test_one_node_does_not_take_all_the_places_of_those_who_pull(source):
    source.downstream._max_pulls = 4
    pulls = [attached(source, live=False) for _ in range(limits.MAX_PULLS_OF_NODE + 1)]
    assert [link.closed for link in pulls] == [False] * limits.MAX_PULLS_OF_NODE + [True]


async def test_a_child_without_attach_ends(source):
    link = Heard(source.downstream)
    source.downstream.accept(link)
    assert link._deadline is not None
    assert not link._deadline.cancelled()
    tell(source, link, Type.ATTACH, {"live": True, "layouts": [], "want": []})
    assert link._deadline.cancelled()
