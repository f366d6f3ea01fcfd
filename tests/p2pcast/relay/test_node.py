"""A node by itself: memory for children, a store that is slow or fails, and the observers of a version on its way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.relay import node as module
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node, PieceCache
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.link import Link
from p2pcast.wire import messages
from p2pcast.wire.connection import Message

PIECE = 1024


class Owner:
    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.excerpts: list[bool] = []
        self.full = False

    def make_log(self, open_, layout, *, excerpt):
        if self.full:
            raise LocalError("no space is left")
        self.excerpts.append(excerpt)
        return self.store.begin_excerpt(open_) if excerpt else self.store.begin(open_, layout)

    def on_opened(self, holding): ...
    def on_complete(self, holding): ...
    def on_aborted(self, holding): ...
    def on_upstream_lost(self, upstream, error): ...


class Parent:
    """A source of artifacts, whose link notes whether it is read."""

    live, beside, expecting = True, False, False

    def __init__(self) -> None:
        self.reading = True
        self.wanted: set[bytes] = set()
        self.link = SimpleNamespace(
            pause_reading=lambda: setattr(self, "reading", False),
            resume_reading=lambda: setattr(self, "reading", True),
            close=lambda: None,
        )

    def pushes(self, artifact: bytes) -> bool:
        return True

    def skip(self, artifact: bytes) -> None: ...
    def forgotten(self, artifact: bytes) -> None: ...


@pytest.fixture
async def node(maker, tmp_path):
    made = Node(Owner(ArtifactStore(tmp_path, maker.key.public)), b"c" * 16, maker.key.public)
    made.add_layout(maker.layout)
    yield made
    made.close()


def test_the_cache_keeps_the_newest_pieces_within_its_bytes() -> None:
    cache = PieceCache(250)
    for index in range(3):
        cache.put(b"a", index, bytes(100))
    assert [cache.get(b"a", index) is not None for index in range(3)] == [False, True, True]
    cache.put(b"a", 2, bytes(100))
    assert cache.get(b"a", 1) is not None, "a piece that is here already takes no more room"


async def test_an_artifact_of_an_unknown_layout_or_of_another_run_is_refused(maker, tmp_path) -> None:
    node = Node(Owner(ArtifactStore(tmp_path, maker.key.public)), b"c" * 16, maker.key.public)
    with pytest.raises(IntegrityError, match="layout"):
        node.open(maker.make([10]).open, Parent())
    node.close()
    other = Node(Owner(ArtifactStore(tmp_path, maker.key.public)), b"c" * 16, bytes(32))
    with pytest.raises(IntegrityError):
        other.open(maker.make([10]).open, Parent())
    other.close()


async def test_a_full_disk_ends_the_node(node, maker) -> None:
    node.owner.full = True
    with pytest.raises(LocalError):
        node.open(maker.make([10]).open, Parent())
    with pytest.raises(BaseExceptionGroup) as failed:
        await node.run()
    assert failed.group_contains(LocalError, match="no space")


async def test_the_log_of_a_part_is_that_of_an_excerpt(node, maker) -> None:
    whole, part = maker.make([10], step=1), maker.make([10], step=2)
    node.excerpts.add(part.id)
    node.pulled.add(part.id)
    node.open(whole.open, Parent())
    holding = node.open(part.open, Parent())
    assert node.owner.excerpts == [False, True]
    assert holding.excerpt


async def test_a_disk_that_is_behind_pauses_the_parents_and_nothing_else(node, maker, monkeypatch) -> None:
    made, parent = maker.make([PIECE * 4], piece=PIECE), Parent()
    node.upstreams.add(parent)
    holding = node.open(made.open, parent)
    node.add_batch(holding, made.batches[0])
    monkeypatch.setattr(module, "BACKLOG_HIGH_BYTES", PIECE)
    for index, payload in enumerate(made.pieces(PIECE)[:3]):
        assert holding.artifact.offer(index, memoryview(payload)).value
        node.add_piece(holding, index, memoryview(payload))
    assert (node.paused, parent.reading) == (True, False)
    assert node.payload(holding, 2) == made.pieces(PIECE)[2], "children get pieces that are not on disk yet"
    running = asyncio.create_task(node.run())
    async with asyncio.timeout(600):
        while holding.stored.count < 3:
            node.writeback.flush()
            holding.progress.clear()
            await holding.progress.wait()
    assert (node.paused, parent.reading) == (False, True)
    running.cancel()
    await asyncio.wait([running])
    node.upstreams.clear()


async def test_observers_hear_when_a_version_begins_and_ends(node, maker) -> None:
    heard: list[bool] = []
    node.busy_observers.add(lambda: heard.append(node.busy))
    parent = Parent()
    holding = node.open(maker.make([10]).open, parent)
    node.update_busy()
    assert heard == [True]
    node.abort(holding)
    node.update_busy()
    assert heard == [True, False]


async def test_a_lost_parent_sends_nothing_any_more(node, maker) -> None:
    parent = Parent()
    node.upstreams.add(parent)
    holding = node.open(maker.make([10]).open, parent)
    assert holding.source is parent
    node.upstream_lost(parent, None)
    assert holding.needs_source
    assert node.upstreams == set()


class Recorded(Link):
    def __init__(self, owner: Downstream) -> None:
        super().__init__(owner, b"r" * 16, "child", 1)
        self.sent: list[messages.Record] = []

    def send(self, record, handle=0):
        self.sent.append(record)


async def test_a_closed_node_has_no_children(node) -> None:
    link = Recorded(node.downstream)
    node.downstream.accept(link)
    attach = messages.Attach(live=True, layouts=[], want=[])
    node.downstream.on_link_event(link, None, Message(attach.type, attach))
    assert (node.downstream.count, node.downstream.fed) == (1, 1)
    node.set_path([b"h" * 16])
    assert link.sent[-1] == messages.Path([b"h" * 16, node.ident])
    node.close()
    assert link.closed
    assert node.downstream.count == 0
