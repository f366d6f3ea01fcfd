"""A source and the nodes that pull from it: they get exactly the pieces they ask for, slowly while a version is on its
way.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.artifact import Assembly
from p2pcast.artifact.piece_set import PieceSet, indices_of, ranges_of
from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.relay.node import Node
from p2pcast.relay.pull_source import PullSource
from p2pcast.relay.send_schedule import ChildSchedules, FrameKind
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.link import Link
from p2pcast.wire import messages
from p2pcast.wire.connection import Message, Piece
from p2pcast.wire.messages import Type

PIECE = 1024


@given(st.sets(st.integers(0, 300)), st.integers(0, 400))
def test_ranges_round_trip_to_piece_numbers(pieces, most):
    ordered = sorted(pieces)
    assert indices_of(ranges_of(ordered), most) == ordered[:most]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_exactly_the_pieces_asked_for_are_sent_once(maker, seed, apart):
    draw = random.Random(seed)
    made = maker.make([3000] * draw.randint(1, 20), piece=PIECE, seed=seed)
    artifact = maker.artifact(made)
    count = artifact.assembly.pieces
    gaps = {i for i in range(count) if draw.random() < 0.2}
    artifact.held = PieceSet()
    for index in sorted(set(range(count)) - gaps):
        artifact.held.add(index)
    schedules = ChildSchedules()
    schedules.apart = apart
    readers: dict[int, Assembly] = {}
    sent: list[int] = []
    left, owed, seals = list(range(count)), set(), 0
    draw.shuffle(left)
    schedules.request(artifact, [], seal=True)
    while left or owed or not seals:
        step = draw.random()
        if step < 0.3 and left:
            some, left = left[: draw.randint(1, 9)], left[9:]
            unheld = schedules.request(artifact, some, seal=False)
            assert set(unheld) == set(some) & gaps
            owed |= set(some) - gaps
        elif step < 0.4 and owed:
            back = schedules.cancel(
                artifact.id, ranges_of(sorted(draw.sample(sorted(owed), draw.randint(1, len(owed)))))
            )
            assert set(back) <= owed
            owed -= set(back)
        else:
            stripe = draw.randint(0, 2)
            for send in schedules.next(stripe):
                assert send.kind is not FrameKind.LAYOUT or stripe not in readers
                if send.kind is FrameKind.OPEN:
                    readers[stripe] = Assembly(send.signed, maker.key.public, maker.layout)
                elif send.kind is FrameKind.BATCH:
                    readers[stripe].add_batch(send.signed)
                elif send.kind is FrameKind.SEAL:
                    readers[stripe].add_manifest(send.signed)
                    seals += 1
                    assert stripe == 0
                elif send.kind is FrameKind.PIECE:
                    assert readers[stripe].piece_hash(send.index) is not None, (
                        "the piece's batch came first, on this stripe"
                    )
                    assert not (apart and stripe == 0)
                    owed.remove(send.index)
                    sent.append(send.index)
    assert len(sent) == len(set(sent))
    assert seals == 1
    assert not schedules.pushing


def test_too_many_or_pushed_pieces_cannot_be_asked_for(maker):
    artifact = maker.artifact(maker.make([3000] * 4, piece=PIECE))
    schedules = ChildSchedules()
    schedules.request(artifact, [0] * limits.MAX_REQUESTED, seal=False)
    with pytest.raises(RemoteError, match="at once"):
        schedules.request(artifact, [0], seal=False)
    pushed = ChildSchedules()
    pushed.add(artifact, [], live=True)
    with pytest.raises(RemoteError, match="sent whole"):
        pushed.request(artifact, [0], seal=False)
    assert pushed.cancel(artifact.id, [0, 1 << 20]) == []


# -- the shell


class Paced:
    """A stripe that takes no data and records its rate limit."""

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
    stripes: dict[int, Any]

    def __init__(self, owner, stripes: int = 1, node: bytes = b"r" * 16):
        super().__init__(owner, node, "remote", stripes)
        self.said: list[messages.Record] = []
        self.stripes = {n: Paced() for n in range(stripes)}

    def send(self, record, handle=0):
        self.said.append(record)

    def heard(self, kind: type[messages.Record]) -> list[messages.Record]:
        return [record for record in self.said if type(record) is kind]


class Owner:
    def make_log(self, open_, layout, *, excerpt):
        return None

    def on_opened(self, holding): ...
    def on_complete(self, holding): ...
    def on_offered(self, upstream): ...
    def on_upstream_lost(self, upstream, error): ...


@pytest.fixture
async def source(maker):
    node = Node(Owner(), b"c" * 16, maker.key.public, max_pulls=2)
    node.add_layout(maker.layout)
    yield node
    node.disk.shutdown()


def tell(node: Node, link: Link, record: messages.Record) -> None:
    node.downstream.on_link_event(link, None, Message(record.type, record))


def attached(node: Node, *, live: bool, stripes: int = 3, remote: bytes = b"r" * 16) -> Heard:
    link = Heard(node.downstream, stripes, remote)
    node.downstream.accept(link)
    tell(node, link, messages.Attach(live=live, layouts=[], want=[]))
    return link


def stored(maker, node: Node, step: int = 1) -> bytes:
    made = maker.make([5000] * 30, step=step, piece=PIECE)
    assembly = Assembly(made.open, maker.key.public, maker.layout)
    for batch in made.batches:
        assembly.add_batch(batch)
    assembly.add_manifest(made.manifest)
    return node.add_stored(assembly, None).id


async def test_a_source_announces_held_and_then_new_pieces(source, maker):
    whole = stored(maker, source)
    coming = maker.make([5000] * 3, step=2, piece=PIECE)
    holding = source.open(coming.open, None)
    link = attached(source, live=False)
    tell(source, link, messages.Request(artifact=whole, pieces=[], seal=False))
    tell(source, link, messages.Request(artifact=coming.id, pieces=[], seal=False))
    tell(source, link, messages.Request(artifact=b"x" * 16, pieces=[], seal=False))
    pieces = source.holdings[whole].assembly.pieces
    assert link.heard(messages.Have) == [
        messages.Have(whole, [0, pieces], sealed=True),
        messages.Have(coming.id, [], sealed=False),
    ]
    assert link.heard(messages.Gone) == [messages.Gone(b"x" * 16)]
    tell(source, link, messages.Request(artifact=coming.id, pieces=[0, 2], seal=False))
    assert link.heard(messages.Cancelled) == [messages.Cancelled(coming.id, [0, 2])]
    for batch in coming.batches:
        holding.assembly.add_batch(batch)
    holding.artifact.offer(1, memoryview(coming.pieces(PIECE)[1]))
    assert not source.downstream.line_up(holding, 1), "a child that pulls is sent no piece unasked"
    (child,) = source.downstream.children.values()
    assert child.schedules.get(coming.id).news == [1]


async def test_live_children_do_not_count_as_pulling_children(source):
    live = attached(source, live=True)
    pulls = [attached(source, live=False, remote=bytes([n]) * 16) for n in range(3)]
    assert [link.closed for link in (live, *pulls)] == [False, False, False, True]


async def test_a_version_on_its_way_slows_pulled_pieces_and_no_messages(source, maker):
    whole = stored(maker, source)
    links = [attached(source, live=False) for _ in range(2)]
    for link in links:
        tell(source, link, messages.Request(artifact=whole, pieces=[0, 3], seal=False))
    rates = lambda: [[stripe.rate for stripe in link.stripes.values()] for link in links]  # noqa: E731
    assert rates() == [[None] * 3] * 2
    coming = source.open(maker.make([5000] * 3, step=2, piece=PIECE).open, None)
    assert not source.busy, "no source sends the artifact yet"
    Upstream(source, Heard(None), live=True).start()
    assert coming.source is not None
    source.update_busy()
    assert source.busy
    for fast, *slow in rates():
        assert fast is None
        assert all(rate is not None and rate > 0 for rate in slow)
    source.holdings.pop(coming.id)
    source.update_busy()
    assert rates() == [[None] * 3] * 2
    tell(source, links[0], messages.SetRate(5000))
    assert rates() == [[None, 5000, 5000], [None] * 3]
    tell(source, links[0], messages.SetRate(None))
    assert rates() == [[None] * 3] * 2


async def test_a_pulled_artifact_is_not_a_version_on_its_way(source, maker):
    class Puller:
        def owed(self, one):
            return False

    live = attached(source, live=True)
    made = maker.make([5000] * 3, step=2, piece=PIECE)
    source.pulled.add(made.id)
    one = PullSource(source, Puller(), Heard(None))
    one.start()
    one.on_link_event(one.link, None, Message(Type.OPEN, messages.NO_BODY, 1, made.open))
    assert made.id in source.holdings
    assert not source.busy
    assert not list(source.downstream.children[live].schedules), "the artifact is not pushed to live children"
    assert source.wants() == []


async def test_a_piece_that_was_not_asked_for_ends_the_link(source, maker):
    class Puller:
        def owed(self, one):
            return False

        def received(self, one, size): ...

        def expects(self, one, artifact, piece):
            return False

    made = maker.make([5000] * 3, step=2, piece=PIECE)
    source.pulled.add(made.id)
    one = PullSource(source, Puller(), Heard(None))
    one.start()
    one.on_link_event(one.link, None, Message(Type.OPEN, messages.NO_BODY, 1, made.open))
    one.on_link_event(one.link, None, Message(Type.BATCH, messages.NO_BODY, 1, made.batches[0]))
    one.on_link_event(one.link, None, Piece(1, 0, memoryview(made.pieces(PIECE)[0])))
    assert one.link.closed
    assert source.holdings[made.id].artifact.held.count == 0


@pytest.mark.parametrize("begun", [False, True])
async def test_a_parent_is_asked_not_to_push_an_artifact_that_will_be_pulled(source, maker, begun):
    link = attached(source, live=True)
    made = maker.make([5000] * 3, step=2, piece=PIECE)
    if begun:
        source.open(made.open, None)
    tell(source, link, messages.Cancel(made.id, [0, limits.MAX_PIECES]))
    assert link.heard(messages.Cancelled) == [messages.Cancelled(made.id, [] if begun else [0, limits.MAX_PIECES])]
    source.open(made.open, None)
    assert bool(list(source.downstream.children[link].schedules)) is begun


async def test_one_node_cannot_take_all_places_for_pulling(source):
    source.downstream._max_pulls = 4
    pulls = [attached(source, live=False) for _ in range(limits.MAX_PULLS_PER_NODE + 1)]
    assert [link.closed for link in pulls] == [False] * limits.MAX_PULLS_PER_NODE + [True]


async def test_a_link_without_attach_ends(source):
    link = Heard(source.downstream)
    source.downstream.accept(link)
    assert link._deadline is not None
    assert not link._deadline.cancelled()
    tell(source, link, messages.Attach(live=True, layouts=[], want=[]))
    assert link._deadline.cancelled()
