"""A child's handling of its parent's messages, one by one."""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.artifact import RunKey
from p2pcast.artifact.signed_records import Open
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from p2pcast.relay.node import Node
from p2pcast.relay.tuning import ALIVE_ACTIVE_S, SILENCE_FLOOR_S
from p2pcast.relay.upstream import MAX_UNNAMED_LAYOUTS, Upstream
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.link import Link
from p2pcast.wire import messages
from p2pcast.wire.connection import Message, Piece
from p2pcast.wire.messages import Type


class Heard(Link):
    """A link without stripes that records the messages to send."""

    def __init__(self, owner=None):
        super().__init__(owner, b"r" * 16, "remote", 1)
        self.said = []

    def send(self, record, handle=0):
        self.said.append(record)


class Owner:
    def __init__(self, store):
        self.store = store
        self.aborted = []
        self.lost = []

    def make_log(self, open_, layout, *, excerpt):
        return self.store.begin(open_, layout)

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
    """(node, upstream, link) of a node that has just attached to a live parent."""
    node = Node(Owner(ArtifactStore(tmp_path, maker.key.public)), b"c" * 16, maker.key.public)
    link = Heard()
    upstream = Upstream(node, link, live=True)
    upstream.start()
    yield node, upstream, link
    node.close()


def hear(owner, link, record, handle=0):
    owner.on_link_event(link, None, Message(record.type, record, handle))


def hear_signed(upstream, link, kind, handle, signed):
    upstream.on_link_event(link, None, Message(kind, messages.NO_BODY, handle, signed))


async def test_an_abort_may_overtake_its_open(child, maker):
    """ABORT and OPEN may come on different stripes. A later OPEN of the handle is ignored, and the link stays up."""
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3, piece=1024)
    hear(upstream, link, messages.Abort(), handle=7)
    hear_signed(upstream, link, Type.OPEN, 7, made.open)
    hear_signed(upstream, link, Type.BATCH, 7, made.batches[0])
    upstream.on_link_event(link, None, Piece(7, 0, memoryview(made.pieces(1024)[0])))
    assert not link.closed
    assert node.holdings == {}
    assert not upstream.active


async def test_unsigned_layouts_do_not_accumulate(child, maker):
    node, upstream, link = child
    for n in range(50):
        other = Layout([Tensor(f"t{n}", "BF16", (4, 4))])
        hear(upstream, link, messages.Layout(other.layout_id, other.document))
    assert node.layouts == {}
    assert len(upstream._layouts) <= MAX_UNNAMED_LAYOUTS
    made = maker.make([5000] * 3)
    hear(upstream, link, messages.Layout(maker.layout.layout_id, maker.layout.document))
    hear_signed(upstream, link, Type.OPEN, 1, made.open)
    assert not link.closed
    assert list(node.layouts) == [maker.layout.layout_id]
    assert list(node.holdings) == [made.id]


async def test_a_layout_under_another_layouts_id_is_refused(child, maker):
    node, upstream, link = child
    other = Layout([Tensor("t", "BF16", (4, 4))])
    hear(upstream, link, messages.Layout(maker.layout.layout_id, other.document))
    hear_signed(upstream, link, Type.OPEN, 1, maker.make([1]).open)
    assert link.closed
    assert link.error.wire_code == "integrity"
    assert node.layouts == {}


async def test_frames_of_an_unopened_handle_end_the_link(child, maker):
    made = maker.make([5000] * 3)
    for message in (
        Message(Type.BATCH, messages.NO_BODY, 3, made.batches[0]),
        Message(Type.SEAL, messages.NO_BODY, 3, made.manifest),
        Piece(3, 0, memoryview(b"x")),
    ):
        node, _, _ = child
        link = Heard()
        upstream = Upstream(node, link, live=True)
        upstream.start()
        upstream.on_link_event(link, None, message)
        assert link.closed
        assert "never opened" in str(link.error)


async def test_forgeries_end_the_link(child, maker):
    node, _, _ = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 30, piece=1024)
    forged = bytearray(made.open)
    forged[-1] ^= 1
    for frames in (
        [(Type.OPEN, bytes(forged))],
        [(Type.OPEN, made.open), (Type.BATCH, made.batches[0][:-1])],
        [(Type.OPEN, made.open), (Type.SEAL, made.manifest[:40])],
        [(Type.OPEN, made.open), (Type.BATCH, maker.make([9] * 30, step=8).batches[0])],
    ):
        link = Heard()
        upstream = Upstream(node, link, live=True)
        upstream.start()
        for kind, signed in frames:
            assert not link.closed
            hear_signed(upstream, link, kind, 1, signed)
        assert link.error.wire_code == "integrity"
        assert upstream.ended.done()
    assert ArtifactStore(node.owner.store.root, RunKey(bytes([9]) * 32).public).artifacts == {}


async def test_pieces_of_an_artifact_that_the_hub_dropped_are_ignored(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 30, piece=1024)
    hear_signed(upstream, link, Type.OPEN, 1, made.open)
    hear_signed(upstream, link, Type.BATCH, 1, made.batches[0])
    assert upstream.active
    node.abort(node.holdings[made.id])
    upstream.on_link_event(link, None, Piece(1, 0, memoryview(made.pieces(1024)[0])))
    assert not link.closed
    assert node.bytes_received == 0
    assert not upstream.active
    assert node.owner.aborted == [made.id]


async def test_a_parent_that_speaks_first_is_answered(child):
    """Also before ``start``."""
    node, _, _ = child
    link = Heard()
    upstream = Upstream(node, link, live=True)
    hear(upstream, link, messages.Ping(4))
    assert link.said == [messages.Pong(4)]


async def test_a_link_that_closed_before_its_start_becomes_no_source(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3)
    hear_signed(upstream, link, Type.OPEN, 1, made.open)
    link.close()
    assert [h.id for h in node.wants()] == [made.id]
    dead = Heard()
    late = Upstream(node, dead, live=True)
    dead.close()
    late.start()
    assert [h.id for h in node.wants()] == [made.id], "the next parent is asked for it"
    assert node.upstreams == set()


async def test_a_child_that_never_saw_the_open_is_sent_gone(child, maker):
    node, _, _ = child
    node.add_layout(maker.layout)
    downstream = node.downstream
    link = Heard(downstream)
    downstream.accept(link)
    wish = maker.make([5000] * 3)
    hear(downstream, link, messages.Attach(live=True, layouts=[], want=[(wish.id, [0, 2])]))
    holding = node.open(wish.open, None)
    (schedule,) = downstream.children[link].schedules
    assert schedule.have == [0, 2], "the wish is kept together with the pieces that the child holds"
    node.abort(holding)
    assert [said.type for said in link.said] == [Type.ATTACHED, Type.GONE]
    hear(downstream, link, messages.Want(b"?" * 16, []))
    assert link.said[-1] == messages.Gone(b"?" * 16)
    hear(downstream, link, messages.Attach(live=True, layouts=[], want=[]))
    assert link.closed
    assert "twice" in str(link.error)


async def test_an_excerpt_is_not_sent_to_a_child_that_wants_the_artifact(child, maker):
    node, _, _ = child
    node.add_layout(maker.layout)
    link = Heard(node.downstream)
    node.downstream.accept(link)
    wish = maker.make([5000] * 3)
    hear(node.downstream, link, messages.Attach(live=True, layouts=[], want=[(wish.id, [])]))
    node.excerpts.add(wish.id)
    node.give_up(node.open(wish.open, None))
    assert [said.type for said in link.said] == [Type.ATTACHED]
    node.excerpts.clear()
    holding = node.open(wish.open, None)
    (schedule,) = node.downstream.children[link].schedules
    assert schedule.artifact is holding.artifact, "the wish is kept until the whole artifact opens"


async def test_an_artifact_announced_by_the_hub_makes_a_link_active(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3, piece=1024)
    artifact = Open.from_signed(made.open, maker.key.public).artifact
    pull = Upstream(node, Heard(), live=False)
    for each in (upstream, pull):
        each.expect(artifact)
    assert (upstream.active, pull.active) == (True, False)
    hear_signed(upstream, link, Type.OPEN, 7, made.open)
    assert upstream._expected == {}
    assert upstream.active
    hear(upstream, link, messages.Abort(), handle=7)
    assert not upstream.active


class Far(Heard):
    rtt_s = 30.0

    def __init__(self):
        super().__init__()
        self.asked_long = asyncio.Event()

    def send(self, record, handle=0):
        super().send(record, handle)
        if len(self.said) > 3 * SILENCE_FLOOR_S / ALIVE_ACTIVE_S:
            self.asked_long.set()


async def test_a_far_parent_is_not_left_before_its_first_message(child, maker):
    """A version opens while a child attaches: the answers to ATTACH and to the first PING are in flight."""
    node, _, _ = child
    link = Far()
    upstream = Upstream(node, link, live=True)
    upstream.start()
    upstream.expect(maker.make([5000]).id)
    running = asyncio.create_task(upstream.run())
    longing = asyncio.create_task(link.asked_long.wait())
    await asyncio.wait({running, longing}, timeout=600, return_when=asyncio.FIRST_COMPLETED)
    assert longing.done()
    assert not link.closed
    link.close()
    await running


async def test_a_parent_that_catches_up_does_not_push_held_artifacts(child, maker):
    """The parent opens old artifacts late. It pushes none that the child named in ATTACH or SKIP, until a WANT."""
    node, _, _ = child
    node.add_layout(maker.layout)
    downstream = node.downstream
    link = Heard(downstream)
    downstream.accept(link)
    old, later, new = (maker.make([5000] * 3, step=step) for step in (1, 2, 3))
    hear(downstream, link, messages.Attach(live=True, layouts=[], want=[], spare=[old.id]))
    hear(downstream, link, messages.Skip(later.id))
    for made in (old, later, new):
        node.open(made.open, None)

    def fed() -> set[bytes]:
        return {schedule.artifact.id for schedule in downstream.children[link].schedules}

    assert fed() == {new.id}
    hear(downstream, link, messages.Skip(new.id))
    assert fed() == set(), "SKIP ends a transfer that has begun"
    hear(downstream, link, messages.Want(old.id, []))
    assert fed() == {old.id}


async def test_the_number_of_spared_artifacts_is_limited(child, maker, monkeypatch):
    node, _, _ = child
    downstream = node.downstream
    link = Heard(downstream)
    downstream.accept(link)
    hear(downstream, link, messages.Attach(live=True, layouts=[], want=[]))
    monkeypatch.setattr("p2pcast.ground.limits.MAX_CATALOG", 3)
    for n in range(4):
        assert not link.closed
        hear(downstream, link, messages.Skip(bytes([n]) * 16))
    assert link.closed


async def test_an_artifact_that_is_here_or_has_another_source_is_not_pushed(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    here, asked, crossed = (maker.make([5000] * 3, step=step) for step in (1, 2, 3))
    hear_signed(upstream, link, Type.OPEN, 1, here.open)
    pull = Upstream(node, Heard(), live=False)
    pull.start()
    link.said.clear()
    pull.want(asked.id)
    assert link.said == [messages.Skip(asked.id)]
    hear_signed(pull, pull.link, Type.OPEN, 1, asked.open)
    hear_signed(pull, pull.link, Type.OPEN, 2, crossed.open)
    link.said.clear()
    hear_signed(upstream, link, Type.OPEN, 2, crossed.open)
    assert link.said == [messages.Skip(crossed.id)], "the OPEN was in flight before the SKIP"
    other = Heard()
    later = Upstream(node, other, live=True)
    later.start()
    (attach,) = other.said
    assert set(attach.spare) == {here.id, asked.id, crossed.id}
    pull.link.close()
    last = Heard()
    again = Upstream(node, last, live=True)
    again.start()
    assert {w[0] for w in last.said[0].want} == {asked.id, crossed.id}
    assert last.said[0].spare == [here.id]


async def test_a_parent_is_not_left_for_a_spared_artifact(child, maker):
    node, upstream, link = child
    node.add_layout(maker.layout)
    pull = Upstream(node, Heard(), live=False)
    pull.start()
    made = maker.make([5000] * 3)
    hear_signed(pull, pull.link, Type.OPEN, 1, made.open)
    hear_signed(upstream, link, Type.OPEN, 1, made.open)
    assert not upstream.active
    assert pull.active


async def test_an_artifact_that_the_parent_lacks_may_get_another_source(child, maker, monkeypatch):
    """A peer comes back with a part of an old artifact. Its parent reached that version by another path, and never
    opens the artifact.
    """
    monkeypatch.setattr("p2pcast.relay.upstream.EXPECTED_S", 0.01)
    node, first, link = child
    node.add_layout(maker.layout)
    part, told = (maker.make([5000] * 3, step=step) for step in (1, 2))
    for handle, made in enumerate((part, told)):
        hear_signed(first, link, Type.OPEN, handle, made.open)
    link.close()
    parent = Heard()
    upstream = Upstream(node, parent, live=True)
    upstream.start()
    assert upstream.wanted == {part.id, told.id}
    offer = messages.Offered(told.id, "delta", Version(0, 1), Version(0, 2), False)
    running = asyncio.ensure_future(upstream.run())
    hear(upstream, parent, messages.Attached([], [offer]))
    released = asyncio.Event()
    node.owner.on_offered = lambda _: released.set()
    async with asyncio.timeout(600):
        await released.wait()
    assert node.holdings[part.id].source is None
    assert upstream.wanted == {told.id}
    assert node.holdings[told.id].source is upstream, "the parent itself is receiving it"
    hear_signed(upstream, parent, Type.OPEN, 7, part.open)
    assert node.holdings[part.id].source is upstream, "the parent opened it late"
    hear(upstream, parent, messages.Gone(told.id))
    assert node.holdings[told.id].source is None
    assert upstream.wanted == set()
    parent.close()
    await running


async def test_giving_an_artifact_up_wakes_its_waiters(child, maker):
    """Another path turned out shorter: the decoder wakes, and children are sent GONE and not ABORT."""
    node, upstream, link = child
    node.add_layout(maker.layout)
    made = maker.make([5000] * 3)
    hear_signed(upstream, link, Type.OPEN, 1, made.open)
    holding = node.holdings[made.id]
    below = Heard(node.downstream)
    node.downstream.accept(below)
    hear(node.downstream, below, messages.Attach(live=True, layouts=[], want=[(made.id, [])]))
    holding.progress.clear()
    node.give_up(holding)
    assert holding.aborted
    assert holding.progress.is_set()
    assert node.holdings == {}
    assert below.said[-1] == messages.Gone(made.id)
    assert node.owner.aborted == [], "the caller removes the log"
    node.give_up(holding)
    assert isinstance(below.said[-2], messages.Attached)


async def test_a_parent_that_withholds_an_artifact_is_not_asked_to_decline(child, maker):
    """The answer would never come, and the artifact would wait for it."""
    node, upstream, link = child
    node.add_layout(maker.layout)
    artifact = node.open(maker.make([1]).open, upstream).id
    upstream.give_up_on(artifact)
    link.said.clear()
    with pytest.raises(StopIteration) as answered:
        upstream.decline(artifact).send(None)
    assert answered.value.value is True
    assert link.said == []


async def test_a_pong_without_a_ping_does_not_set_the_round_trip(child):
    """A forged round trip would have the child wait for hours: four round trips of silence are allowed."""
    _, upstream, link = child
    hear(upstream, link, messages.Pong(0))
    assert upstream._watch.rtt_s is None
    running = asyncio.create_task(upstream.run())
    async with asyncio.timeout(600):
        while not (pings := [said for said in link.said if isinstance(said, messages.Ping)]):
            await upstream._wakeup.wait(0.01)
    hear(upstream, link, messages.Pong(pings[0].t))
    first = upstream._watch.rtt_s
    assert first is not None
    hear(upstream, link, messages.Pong(pings[0].t))
    assert upstream._watch.rtt_s == first, "each PING takes one answer"
    running.cancel()
    await asyncio.wait([running])
