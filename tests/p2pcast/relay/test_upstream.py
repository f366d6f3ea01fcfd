"""What a parent may say, and what a child makes of it, message by message."""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.artifact import RunKey
from p2pcast.artifact.records import Open
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.liveness import ALIVE_ACTIVE_S, SILENCE_FLOOR_S
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import MAX_UNNAMED_LAYOUTS, Upstream
from p2pcast.store.store import Store
from p2pcast.transport.link import Link
from p2pcast.wire.connection import Message, Piece
from p2pcast.wire.messages import Type


class Heard(Link):
    """A link without stripes that keeps what was to be sent."""

    def __init__(self, owner):
        super().__init__(owner, b"r" * 16, "remote", 1)
        self.said = []

    def send(self, kind, body, handle=0):
        self.said.append((kind, body, handle))


class Owner:
    def __init__(self, store):
        self.store = store
        self.make_log = store.begin
        self.aborted = []
        self.lost = []

    def on_opened(self, holding): ...
    def on_complete(self, holding): ...
    def on_offered(self, upstream): ...

    def on_aborted(self, holding):
        self.store.abandon(holding.log, holding.id)
        self.aborted.append(holding.id)

    def on_upstream_lost(self, upstream, error):
        self.lost.append(error)


@pytest.fixture
async def child(maker, tmp_path):
    """(node, upstream, link): a node that has just attached, live."""
    node = Node(Owner(Store(tmp_path, maker.key.public)), b"c" * 16, maker.key.public)
    Downstream(node)
    upstream = Upstream(node, live=True)
    link = Heard(upstream)
    upstream.start(link)
    yield node, upstream, link
    node.close()


def hear(upstream, link, kind, body=None, handle=0, signed=b""):
    upstream.on_link_event(link, None, Message(kind, body or {}, handle, signed))


async def test_an_abort_may_overtake_its_open(child, maker):
    """They may come on different stripes: the OPEN that follows is then ignored, and the link goes on."""
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3, piece=1024)
    hear(upstream, link, Type.ABORT, handle=7)
    hear(upstream, link, Type.OPEN, handle=7, signed=made.open)
    hear(upstream, link, Type.BATCH, handle=7, signed=made.batches[0])
    upstream.on_link_event(link, None, Piece(7, 0, memoryview(made.pieces(1024)[0])))
    assert not link.closed
    assert node.holdings == {}
    assert not upstream.active


async def test_layouts_that_nobody_has_signed_do_not_pile_up(child, maker):
    node, upstream, link = child
    for n in range(50):
        other = Layout([Tensor(f"t{n}", "BF16", (4, 4))])
        hear(upstream, link, Type.LAYOUT, {"layout": other.layout_id, "document": other.document})
    assert node.layouts == {}
    assert len(upstream._layouts) <= MAX_UNNAMED_LAYOUTS
    made = maker.make([5000] * 3)
    hear(upstream, link, Type.LAYOUT, {"layout": maker.layout.layout_id, "document": maker.layout.document})
    hear(upstream, link, Type.OPEN, handle=1, signed=made.open)
    assert not link.closed
    assert list(node.layouts) == [maker.layout.layout_id]
    assert list(node.holdings) == [made.id]


async def test_a_layout_that_is_not_what_it_is_called_is_refused(child, maker):
    node, upstream, link = child
    other = Layout([Tensor("t", "BF16", (4, 4))])
    hear(upstream, link, Type.LAYOUT, {"layout": maker.layout.layout_id, "document": other.document})
    hear(upstream, link, Type.OPEN, handle=1, signed=maker.make([1]).open)
    assert link.closed
    assert link.error.wire_code == "integrity"
    assert node.layouts == {}


async def test_what_was_never_opened(child, maker):
    made = maker.make([5000] * 3)
    for message in (
        Message(Type.BATCH, {}, 3, made.batches[0]),
        Message(Type.SEAL, {}, 3, made.manifest),
        Piece(3, 0, memoryview(b"x")),
    ):
        node, _, _ = child
        upstream = Upstream(node, live=True)
        link = Heard(upstream)
        upstream.start(link)
        upstream.on_link_event(link, None, message)
        assert link.closed
        assert "never opened" in str(link.error)


async def test_forgeries_end_the_link(child, maker):
    node, _, _ = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 30, piece=1024)
    forged = bytearray(made.open)
    forged[-1] ^= 1
    for messages in (
        [(Type.OPEN, bytes(forged))],
        [(Type.OPEN, made.open), (Type.BATCH, made.batches[0][:-1])],
        [(Type.OPEN, made.open), (Type.SEAL, made.manifest[:40])],
        [(Type.OPEN, made.open), (Type.BATCH, maker.make([9] * 30, step=8).batches[0])],
    ):
        upstream = Upstream(node, live=True)
        link = Heard(upstream)
        upstream.start(link)
        for kind, signed in messages:
            assert not link.closed
            hear(upstream, link, kind, handle=1, signed=signed)
        assert link.error.wire_code == "integrity"
        assert upstream.ended.done()
    assert Store(node.owner.store.root, RunKey(bytes([9]) * 32).public).artifacts == {}


async def test_pieces_of_what_the_hub_has_dropped_are_ignored(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 30, piece=1024)
    hear(upstream, link, Type.OPEN, handle=1, signed=made.open)
    hear(upstream, link, Type.BATCH, handle=1, signed=made.batches[0])
    assert upstream.active
    node.abort(node.holdings[made.id])
    upstream.on_link_event(link, None, Piece(1, 0, memoryview(made.pieces(1024)[0])))
    assert not link.closed
    assert node.bytes_received == 0
    assert not upstream.active
    assert node.owner.aborted == [made.id]


async def test_a_parent_that_speaks_first_is_answered(child):
    """Before ``start`` there is no link yet but the one that the event came by."""
    node, _, _ = child
    upstream = Upstream(node, live=True)
    link = Heard(upstream)
    hear(upstream, link, Type.PING, {"t": 4})
    assert link.said == [(Type.PONG, {"t": 4}, 0)]


async def test_a_link_that_closed_before_it_began_claims_nothing(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3)
    hear(upstream, link, Type.OPEN, handle=1, signed=made.open)
    link.close()
    assert [h.id for h in node.wants()] == [made.id]
    late = Upstream(node, live=True)
    dead = Heard(late)
    dead.close()
    late.start(dead)
    assert [h.id for h in node.wants()] == [made.id], "it is still free for the next parent"
    assert node.upstreams == set()


async def test_a_child_that_never_saw_the_open_is_told_that_it_is_gone(child, maker):
    node, _, _ = child
    node.add_layout(maker.layout)
    downstream = node.downstream
    link = Heard(downstream)
    downstream.accept(link)
    wish = maker.make([5000] * 3)
    downstream.on_link_event(link, None, Message(Type.ATTACH, {"live": True, "layouts": [], "want": [[wish.id, [0, 2]]]}))
    holding = node.open(wish.open, None)
    (feed,) = downstream.children[link].feeds
    assert feed.have == [0, 2], "a wish is kept with what the child holds"
    node.abort(holding)
    assert [said[0] for said in link.said] == [Type.ATTACHED, Type.GONE]
    downstream.on_link_event(link, None, Message(Type.WANT, {"artifact": b"?" * 16, "have": []}))
    assert link.said[-1] == (Type.GONE, {"artifact": b"?" * 16}, 0)
    downstream.on_link_event(link, None, Message(Type.ATTACH, {"live": True, "layouts": [], "want": []}))
    assert link.closed
    assert "twice" in str(link.error)


async def test_what_is_here_as_an_excerpt_is_fed_to_no_child_that_wished_for_all_of_it(child, maker):
    node, _, _ = child
    node.add_layout(maker.layout)
    link = Heard(node.downstream)
    node.downstream.accept(link)
    wish = maker.make([5000] * 3)
    ask = {"live": True, "layouts": [], "want": [[wish.id, []]]}
    node.downstream.on_link_event(link, None, Message(Type.ATTACH, ask))
    node.excerpts.add(wish.id)
    node.give_up(node.open(wish.open, None))
    assert [said[0] for said in link.said] == [Type.ATTACHED]
    node.excerpts.clear()
    holding = node.open(wish.open, None)
    (feed,) = node.downstream.children[link].feeds
    assert feed.artifact is holding.artifact, "the wish is kept until it opens for good"


async def test_what_the_hub_has_opened_makes_a_link_active_before_the_parent_has_it(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3, piece=1024)
    artifact = Open.from_signed(made.open, maker.key.public).artifact
    pull = Upstream(node, live=False)
    for each in (upstream, pull):
        each.expect(artifact)
    assert (upstream.active, pull.active) == (True, False)
    hear(upstream, link, Type.OPEN, handle=7, signed=made.open)
    assert upstream._expected == {}
    assert upstream.active
    hear(upstream, link, Type.ABORT, handle=7)
    assert not upstream.active


class Far(Heard):
    rtt_s = 30.0

    def __init__(self, owner):
        super().__init__(owner)
        self.asked_long = asyncio.Event()

    def send(self, kind, body, handle=0):
        super().send(kind, body, handle)
        if len(self.said) > 3 * SILENCE_FLOOR_S / ALIVE_ACTIVE_S:
            self.asked_long.set()


async def test_a_far_parent_is_not_left_before_its_first_word(child, maker):
    """A version opens while a child attaches: the answers to ATTACH and to the first PING are still on their way."""
    node, _, _ = child
    upstream = Upstream(node, live=True)
    link = Far(upstream)
    upstream.start(link)
    upstream.expect(maker.make([5000]).id)
    running = asyncio.create_task(upstream.run())
    longing = asyncio.create_task(link.asked_long.wait())
    await asyncio.wait({running, longing}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert longing.done()
    assert not link.closed
    link.close()
    await running


async def test_a_parent_that_catches_up_spares_the_child_what_it_has(child, maker):
    """It opens old artifacts late: what the child named in its ATTACH, or later, is not pushed; a WANT takes that back."""
    node, _, _ = child
    node.add_layout(maker.layout)
    downstream = node.downstream
    link = Heard(downstream)
    downstream.accept(link)
    old, later, new = (maker.make([5000] * 3, step=step) for step in (1, 2, 3))
    attach = {"live": True, "layouts": [], "want": [], "spare": [old.id]}
    downstream.on_link_event(link, None, Message(Type.ATTACH, attach))
    downstream.on_link_event(link, None, Message(Type.SPARE, {"artifact": later.id}))
    for made in (old, later, new):
        node.open(made.open, None)

    def fed() -> set[bytes]:
        return {feed.artifact.id for feed in downstream.children[link].feeds}

    assert fed() == {new.id}
    downstream.on_link_event(link, None, Message(Type.SPARE, {"artifact": new.id}))
    assert fed() == set(), "also in the middle of it"
    downstream.on_link_event(link, None, Message(Type.WANT, {"artifact": old.id, "have": []}))
    assert fed() == {old.id}


async def test_no_end_of_sparing(child, maker, monkeypatch):
    node, _, _ = child
    downstream = node.downstream
    link = Heard(downstream)
    downstream.accept(link)
    downstream.on_link_event(link, None, Message(Type.ATTACH, {"live": True, "layouts": [], "want": []}))
    monkeypatch.setattr("p2pcast.limits.MAX_CATALOG", 3)
    for n in range(4):
        assert not link.closed
        downstream.on_link_event(link, None, Message(Type.SPARE, {"artifact": bytes([n]) * 16}))
    assert link.closed


async def test_what_is_here_or_comes_from_elsewhere_is_not_pushed(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    here, asked, crossed = (maker.make([5000] * 3, step=step) for step in (1, 2, 3))
    hear(upstream, link, Type.OPEN, handle=1, signed=here.open)
    pull = Upstream(node, live=False)
    pull.start(Heard(pull))
    link.said.clear()
    pull.want(asked.id)
    assert link.said == [(Type.SPARE, {"artifact": asked.id}, 0)]
    hear(pull, pull.link, Type.OPEN, handle=1, signed=asked.open)
    hear(pull, pull.link, Type.OPEN, handle=2, signed=crossed.open)
    link.said.clear()
    hear(upstream, link, Type.OPEN, handle=2, signed=crossed.open)
    assert link.said == [(Type.SPARE, {"artifact": crossed.id}, 0)], "it was on its way already"
    later = Upstream(node, live=True)
    other = Heard(later)
    later.start(other)
    ((kind, body, _),) = other.said
    assert kind is Type.ATTACH
    assert set(body["spare"]) == {here.id, asked.id, crossed.id}
    pull.link.close()
    again = Upstream(node, live=True)
    last = Heard(again)
    again.start(last)
    assert {w[0] for w in last.said[0][1]["want"]} == {asked.id, crossed.id}
    assert last.said[0][1]["spare"] == [here.id]


async def test_a_parent_is_not_left_for_what_it_was_told_to_spare(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    pull = Upstream(node, live=False)
    pull.start(Heard(pull))
    made = maker.make([5000] * 3)
    hear(pull, pull.link, Type.OPEN, handle=1, signed=made.open)
    hear(upstream, link, Type.OPEN, handle=1, signed=made.open)
    assert not upstream.active
    assert pull.active


async def test_what_the_parent_has_not_got_may_come_from_elsewhere(child, maker, monkeypatch):
    """A peer comes back with a part of an old artifact; its parent has its version by another way, and never opens that one."""
    monkeypatch.setattr("p2pcast.relay.upstream.EXPECTED_S", 0.01)
    node, first, link = child
    node.add_layout(maker.layout)
    part, told = (maker.make([5000] * 3, step=step) for step in (1, 2))
    for handle, made in enumerate((part, told)):
        hear(first, link, Type.OPEN, handle=handle, signed=made.open)
    link.close()
    upstream = Upstream(node, live=True)
    parent = Heard(upstream)
    upstream.start(parent)
    assert upstream.wanted == {part.id, told.id}
    offer = [told.id, "delta", [0, 1], [0, 2], False]
    running = asyncio.ensure_future(upstream.run())
    hear(upstream, parent, Type.ATTACHED, {"path": [], "artifacts": [offer]})
    released = asyncio.Event()
    node.owner.on_offered = lambda _: released.set()
    async with asyncio.timeout(10):
        await released.wait()
    assert node.holdings[part.id].source is None
    assert upstream.wanted == {told.id}
    assert node.holdings[told.id].source is upstream, "it is on its way to the parent, too"
    hear(upstream, parent, Type.OPEN, handle=7, signed=part.open)
    assert node.holdings[part.id].source is upstream, "late, but it has come"
    hear(upstream, parent, Type.GONE, {"artifact": told.id})
    assert node.holdings[told.id].source is None
    assert upstream.wanted == set()
    parent.close()
    await running


async def test_what_is_given_up_is_waited_for_by_nobody(child, maker):
    """Another way turned out shorter: who decodes it is woken, and children look elsewhere without taking it for aborted."""
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3)
    hear(upstream, link, Type.OPEN, handle=1, signed=made.open)
    holding = node.holdings[made.id]
    below = Heard(node.downstream)
    node.downstream.accept(below)
    node.downstream.on_link_event(below, None, Message(Type.ATTACH, {"live": True, "layouts": [], "want": [[made.id, []]]}))
    holding.progress.clear()
    node.give_up(holding)
    assert holding.aborted
    assert holding.progress.is_set()
    assert node.holdings == {}
    assert below.said[-1] == (Type.GONE, {"artifact": made.id}, 0)
    assert node.owner.aborted == [], "its log is the caller's"
    node.give_up(holding)
    assert below.said[-2][0] is Type.ATTACHED


async def test_an_answer_to_no_ping_says_nothing_of_the_way(child):
    """It would have the child wait for this parent for hours: four round trips of silence are borne."""
    _, upstream, link = child
    hear(upstream, link, Type.PONG, {"t": 0})
    assert upstream._watch.rtt_s is None
    running = asyncio.create_task(upstream.run())
    async with asyncio.timeout(30):
        while not (pings := [body for kind, body, _ in link.said if kind is Type.PING]):
            await upstream._bell.wait(0.01)
    hear(upstream, link, Type.PONG, pings[0])
    first = upstream._watch.rtt_s
    assert first is not None
    hear(upstream, link, Type.PONG, pings[0])
    assert upstream._watch.rtt_s == first, "once for each"
    running.cancel()
    await asyncio.wait([running])
