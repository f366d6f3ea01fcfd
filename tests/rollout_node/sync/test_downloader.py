"""A downloader and its sources: real nodes, links and stores over loopback sockets, without hub or daemons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from artifact_maker import Made, Maker

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.relay.artifact_excerpt import Excerpt
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity
from rollout_node.sync import downloader as module
from rollout_node.sync.connector import Connector, Place
from rollout_node.sync.downloader import Downloader, source_dialler

TOKEN = JoinToken(bytes(16), bytes(20))
PIECE = 16384
LIMIT_S = 600.0
"""Seconds after which a hanging test ends."""
MADE = Maker.make([60_000] * 20, piece=PIECE)
OTHER = Maker.make([60_000] * 20, piece=PIECE, step=2)


class Garbling(Node):
    """Changes one bit of every piece that it sends."""

    def payload(self, holding, index):
        found = super().payload(holding, index) or holding.log.read(index * PIECE, PIECE, short=True)
        return bytes([found[0] ^ 1]) + bytes(found[1:])


class Peer:
    """A node with a store, links to children and a listener."""

    def __init__(self, root: Path, number: int, kind: type[Node] = Node) -> None:
        self.ident = bytes([number]) * 16
        self.identity = Identity(self.ident, f"n{number}", TOKEN)
        self.store = ArtifactStore(root / str(number), Maker.key.public)
        self.node = kind(self, self.ident, Maker.key.public)
        self.node.add_layout(Maker.layout)
        self.downstream = self.node.downstream
        self.listener = Listener(self, self.identity)
        self.complete: set[bytes] = set()
        self.served = 0
        """Links that were accepted."""
        self.changed = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self.listener.start("127.0.0.1", 0)
        self.spawn(self.node.run())
        self.spawn(self.downstream.run())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        await self.listener.stop()
        self.downstream.close()
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self.node.close()
        assert not [r for r in results if isinstance(r, Exception)]

    @property
    def place(self) -> Place:
        return (self.ident, *self.listener.address)

    def hold(self, made: Made, pieces: list[int] | None = None) -> Holding:
        """Hold the artifact, or only some of its pieces."""
        assembly = Assembly(made.open, Maker.key.public, Maker.layout)
        for batch in made.batches:
            assembly.add_batch(batch)
        assembly.add_manifest(made.manifest)
        log = self.store.begin(assembly.open, Maker.layout)
        log.write(0, [made.log])
        if pieces is None:
            return self.node.add_stored(assembly, log)
        held = PieceSet()
        for piece in pieces:
            held.add(piece)
        holding = self.node.add_partial(assembly, log, held)
        holding.want()
        return holding

    # -- NodeOwner and LinkAcceptor

    def make_log(self, open_, layout, *, excerpt):
        return self.store.begin(open_, layout)

    def on_opened(self, holding: Holding) -> None: ...
    def on_complete(self, holding: Holding) -> None:
        self.complete.add(holding.id)

    def on_aborted(self, holding: Holding) -> None:
        self.store.abandon(holding.log, holding.id)

    def on_offered(self, upstream) -> None: ...
    def on_upstream_lost(self, upstream, error) -> None: ...
    def accept_link(self, link: Link, hello) -> None:
        self.served += 1
        link.owner = self.downstream
        self.downstream.accept(link)


class NoParent:
    place: Place | None = None
    feeding: Any = None


class AskedHub:
    def __init__(self, hub: Peer, asked: list[tuple[bytes, list[bytes]]]) -> None:
        self._hub = hub
        self._asked = asked

    @property
    def place(self) -> Place:
        return self._hub.place

    def find_sources(self, artifact: bytes, without: list[bytes]) -> None:
        self._asked.append((artifact, without))


class Pulling(Peer):
    """A peer with a downloader. ``asked``: artifacts that it asked the hub for, and the nodes it left out."""

    def __init__(self, root: Path, hub: Peer) -> None:
        super().__init__(root, 100)
        self.parent = NoParent()
        self.asked: list[tuple[bytes, list[bytes]]] = []
        self.connector = Connector(self.identity, lambda *message: False, None)
        self.downloader = Downloader(
            self.node, source_dialler(self.node, self.connector), AskedHub(hub, self.asked), self.parent
        )

    async def start(self) -> None:
        await super().start()
        self.spawn(self.connector.run())
        self.spawn(self.downloader.run())

    async def pulled(self, made: Made) -> Holding:
        """Wait for the whole artifact, and compare every byte."""
        await self.until(lambda: made.id in self.complete)
        holding = self.node.holdings[made.id]
        assert holding.log.read(0, len(made.log)) == made.log
        return holding

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    self.node.validate()
                    await self.downloader.ended.wait(module.TICK_S)
        except TimeoutError:
            raise AssertionError(f"the condition never held: {self.node.holdings}") from None


Add = Callable[..., Coroutine[Any, Any, Peer]]


@pytest.fixture
async def peers(tmp_path) -> AsyncIterator[list[Peer]]:
    started: list[Peer] = []
    yield started
    for peer in reversed(started):
        await peer.stop()


@pytest.fixture
def add(peers, tmp_path) -> Add:
    async def started(kind: type[Node] = Node) -> Peer:
        peers.append(Peer(tmp_path, len(peers) + 1, kind))
        await peers[-1].start()
        return peers[-1]

    return started


@pytest.fixture
async def hub(add) -> Peer:
    return await add()


@pytest.fixture
async def puller(hub, peers, tmp_path) -> Pulling:
    peers.append(Pulling(tmp_path, hub))
    await peers[-1].start()
    return peers[-1]


async def test_two_sources_send_each_piece_once(puller, add, hub):
    sources = [await add(), await add()]
    for source in sources:
        source.hold(MADE)
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [source.place for source in sources])
    await puller.pulled(MADE)
    assert puller.node.bytes_duplicate == 0
    assert puller.downloader.bytes_received == len(MADE.log)
    assert hub.served == 0, "two sources are enough"
    await puller.until(lambda: not puller.downloader.artifacts)
    assert puller.asked[0] == (MADE.id, [])


async def test_sources_with_different_halves_complete_the_artifact(puller, add, hub):
    half = len(MADE.pieces(PIECE)) // 2
    sources = [await add(), await add()]
    sources[0].hold(MADE, list(range(half)))
    sources[1].hold(MADE, list(range(half, len(MADE.pieces(PIECE)))))
    puller.downloader.fetch(MADE.id, anchor=True)
    puller.downloader.add_sources(MADE.id, [source.place for source in sources])
    await puller.pulled(MADE)
    assert puller.node.bytes_duplicate == 0


async def test_pieces_that_no_peer_holds_come_from_the_hub(puller, add, hub):
    source = await add()
    source.hold(MADE, [0, 1, 2])
    hub.hold(MADE)
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [source.place])
    await puller.pulled(MADE)
    assert hub.served == 1


async def test_without_an_answer_about_sources_the_hub_is_the_source(puller, hub, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_S", 0.0)
    hub.hold(MADE)
    puller.downloader.fetch(MADE.id, anchor=False)
    await puller.pulled(MADE)


async def test_a_source_that_sends_wrong_bytes_is_left_for_another(puller, add, hub):
    garbling, honest = await add(Garbling), await add()
    for source in (garbling, honest):
        source.hold(MADE)
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [garbling.place])
    await puller.until(lambda: puller.node.garbled[garbling.ident] > 0)
    puller.downloader.add_sources(MADE.id, [garbling.place, honest.place])
    await puller.pulled(MADE)
    assert garbling.served == 1, "it is not dialled again"


async def test_a_source_that_dies_costs_only_its_own_pieces(puller, add, hub):
    dying, living = await add(), await add()
    for source in (dying, living):
        source.hold(MADE)
        source.hold(OTHER)
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [dying.place, living.place])
    await puller.until(lambda: len(puller.downloader.sources) == 2)
    for link in list(dying.downstream.children):
        link.abort()
    await dying.listener.stop()
    puller.downloader.fetch(OTHER.id, anchor=False)
    puller.downloader.add_sources(OTHER.id, [living.place])
    await puller.pulled(MADE)
    await puller.pulled(OTHER)


async def test_a_node_that_cannot_be_dialled_is_left_out_of_the_next_question(puller, add, hub, monkeypatch):
    monkeypatch.setattr(module, "SEEK_S", 0.0)
    gone = await add()
    place = gone.place
    await gone.listener.stop()
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [place])
    await puller.until(lambda: (MADE.id, [gone.ident]) in puller.asked)
    assert gone.ident not in [source.link.remote for source in puller.downloader.sources]


async def test_an_artifact_that_no_node_has_is_sourceless(puller, hub, monkeypatch):
    monkeypatch.setattr(module, "HOPELESS_S", 0.0)
    await hub.listener.stop()
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.fetch_part(OTHER.id, Excerpt(frozenset({0})), anchor=False)
    for artifact in (MADE.id, OTHER.id):
        puller.downloader.add_sources(artifact, [])
    await puller.until(lambda: puller.downloader.sourceless == [MADE.id])
    assert puller.downloader.sourceless_parts == [OTHER.id]
    puller.downloader.drop(MADE.id)
    assert not puller.downloader.fetches(MADE.id)


class Parent:
    """A parent link whose parent declines to push an artifact, or pushes it already."""

    offers: dict[bytes, object]

    def __init__(self, *, declines: bool) -> None:
        self.offers = {}
        self._declines = declines
        self.asked: list[bytes] = []

    async def decline(self, artifact: bytes) -> bool:
        self.asked.append(artifact)
        return self._declines


async def test_an_artifact_that_the_parent_is_sending_is_not_pulled(puller, hub):
    hub.hold(MADE)
    puller.parent.feeding = Parent(declines=False)
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [])
    await puller.until(lambda: not puller.downloader.fetches(MADE.id))
    assert puller.parent.feeding.asked == [MADE.id]
    assert MADE.id not in puller.node.holdings
    assert MADE.id not in puller.node.pulled, "the parent may send the artifact"


async def test_a_parent_that_offers_the_artifact_and_declines_to_push_is_a_source(puller, add, hub):
    parent = await add()
    parent.hold(MADE)
    link = Parent(declines=True)
    link.offers[MADE.id] = None
    puller.parent.feeding, puller.parent.place = link, parent.place
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [])
    await puller.pulled(MADE)
    assert parent.served == 1


async def test_only_the_pieces_of_the_wanted_part_are_pulled(puller, add, hub):
    source = await add()
    source.hold(MADE)
    excerpt = Excerpt(frozenset({3, 11}))
    wanted = excerpt.pieces(source.node.holdings[MADE.id].assembly)
    puller.downloader.fetch_part(MADE.id, excerpt, anchor=False)
    puller.downloader.add_sources(MADE.id, [source.place])
    await puller.until(lambda: not puller.downloader.fetches(MADE.id))
    holding = puller.node.holdings[MADE.id]
    assert {piece for piece in range(holding.assembly.pieces) if piece in holding.stored} == wanted
    assert holding.excerpt
    for piece in wanted:
        at = piece * PIECE
        assert holding.log.read(at, len(MADE.log[at : at + PIECE])) == MADE.log[at : at + PIECE]
    puller.downloader.release([MADE.id])
    assert MADE.id not in puller.node.excerpts
    assert MADE.id not in puller.node.pulled


async def test_sources_send_slowly_while_a_version_is_on_its_way(puller, add, hub):
    source = await add()
    holding = source.hold(MADE, [0])
    puller.downloader.fetch(MADE.id, anchor=False)
    puller.downloader.add_sources(MADE.id, [source.place])
    await puller.until(lambda: any(s.attached.is_set() for s in puller.downloader.sources))
    children = source.downstream.children
    # A version that this node makes counts as one that is on its way.
    record = Assembly(OTHER.open, Maker.key.public, Maker.layout).open
    making = puller.node.open(OTHER.open, None, puller.make_log(record, Maker.layout, excerpt=False))
    puller.node.update_busy()
    assert puller.node.busy
    await puller.until(lambda: any(child.max_bytes_s is not None for child in children.values()))
    puller.node.abort(making)
    await puller.until(lambda: not puller.node.busy and all(child.max_bytes_s is None for child in children.values()))
    assert holding.artifact.held.count == 1
