"""Artifacts from a mirror in a folder: a real node, a real store and real objects, without a swarm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from artifact_maker import KEY, LAYOUT, Made, Maker
from recorder import Recorder

from p2pcast.artifact import Assembly, run_id
from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.artifact.signed_records import OWN
from p2pcast.ground.errors import RetryableError
from p2pcast.mirror.object_names import ReadyMarker, run_folder, slice_name, tail_name
from p2pcast.mirror.object_store import Objects
from p2pcast.relay.artifact_excerpt import Excerpt
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.sync import mirror_source as module
from rollout_node.sync.mirror_catalog import MirrorCatalog
from rollout_node.sync.mirror_source import MirrorErrors, MirrorSource
from tests.support.until import until

RUN = run_id(KEY.public)
PIECE = 1024
MADE = Maker.make([3000] * 4, piece=PIECE, version_hash=OWN)
PIECES = -(-len(MADE.log) // PIECE)
LIMIT_S = 600.0


class CountedObjects(Objects):
    """Counts the ranges that are requested; ``on_range`` is called before each answer."""

    def __init__(self, url: str, folder: str) -> None:
        super().__init__(url, folder)
        self.ranges: list[tuple[int, int]] = []
        self.on_range = lambda: None

    async def get_range(self, name: str, start: int, size: int) -> memoryview:
        self.ranges.append((start, size))
        found = await super().get_range(name, start, size)
        self.on_range()
        return found


class Peer:
    """A node that only a mirror feeds. A ``NodeOwner``."""

    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root / "store", KEY.public)
        self.node = Node(self, b"p" * 16, KEY.public)
        self.objects = CountedObjects((root / "mirror").as_uri(), run_folder(RUN))
        room = asyncio.Semaphore(module.AT_ONCE)
        self.catalog = MirrorCatalog(self.objects, RUN, room)
        self.errors = MirrorErrors(Recorder())
        self.replanned = 0
        self.finished: dict[bytes, asyncio.Event] = {}
        self.source = MirrorSource(
            self.objects, self.catalog, self.errors, self.node, Recorder(), room,
            swarm_lost=lambda: True, has_parent=lambda: False,
            planner=SimpleNamespace(path=list, replan=self._replan, begun=asyncio.Event()),
            on_listed=lambda: None, at_once=True,
        )  # fmt: skip

    def _replan(self) -> None:
        self.replanned += 1

    async def list_mirror(self, made: Made = MADE, *, durable: bytes | None = None) -> None:
        """Put an artifact on the mirror, and list the mirror."""
        assembly = assembled(made)
        record = assembly.open
        tail = Tail.of(assembly)._replace(durable=made.durable if durable is None else durable)
        await self.objects.put(tail_name(made.id), tail.to_bytes())
        await self.objects.put(slice_name(made.id, 0), made.log)
        await self.objects.put(str(ReadyMarker(record.version, record.base, record.artifact)), made.manifest)
        await self.catalog.refresh(KEY.public)

    async def fetch(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.source._fetch_artifact(MADE.id)

    async def stored(self) -> Holding:
        """Wait until every piece is in the log, and compare every byte."""
        async with asyncio.timeout(LIMIT_S):
            await self.finished.setdefault(MADE.id, asyncio.Event()).wait()
        holding = self.node.holdings[MADE.id]
        assert holding.log.read(0, len(MADE.log)) == MADE.log
        self.node.validate()
        return holding

    def hold(self, pieces: list[int]) -> None:
        """Hold these pieces already, from an earlier process."""
        assembly = assembled(MADE)
        log = self.store.begin(assembly.open, LAYOUT)
        log.write(0, [MADE.log])
        held = PieceSet()
        for piece in pieces:
            held.add(piece)
        self.node.add_partial(assembly, log, held).want()

    # -- NodeOwner

    def make_log(self, open_, layout, *, excerpt):
        return self.store.begin(open_, layout)

    def on_opened(self, holding: Holding) -> None: ...
    def on_complete(self, holding: Holding) -> None:
        self.finished.setdefault(holding.id, asyncio.Event()).set()

    def on_aborted(self, holding: Holding) -> None:
        self.store.abandon(holding.log, holding.id)

    def on_offered(self, upstream) -> None: ...
    def on_upstream_lost(self, upstream, error) -> None: ...


def assembled(made: Made) -> Assembly:
    assembly = Assembly(made.open, KEY.public, LAYOUT)
    for batch in made.batches:
        assembly.add_batch(batch)
    assembly.add_manifest(made.manifest)
    return assembly


@pytest.fixture
async def peer(tmp_path, monkeypatch) -> AsyncIterator[Peer]:
    for name in ("RETRY_MIN_S", "RETRY_MAX_S", "CHECK_S"):
        monkeypatch.setattr(module, name, 1e-5)
    (tmp_path / "mirror").mkdir()
    found = Peer(tmp_path)
    running = asyncio.create_task(found.node.run())
    yield found
    running.cancel()
    await asyncio.wait([running])
    found.node.close()


async def test_a_whole_artifact_comes_from_the_mirror_in_few_requests(peer):
    await peer.list_mirror()
    await peer.fetch()
    holding = await peer.stored()
    assert holding.confirmed
    assert holding.source is None
    assert peer.objects.ranges == [(0, len(MADE.log))]
    assert peer.source.bytes_received == peer.node.bytes_received == len(MADE.log)
    assert not peer.source._due(MADE.id)


async def test_held_pieces_are_not_requested(peer):
    await peer.list_mirror()
    peer.hold([0, 1, 5])
    assert peer.source._due(MADE.id)
    await peer.fetch()
    await peer.stored()
    assert peer.objects.ranges == [(2 * PIECE, 3 * PIECE), (6 * PIECE, len(MADE.log) - 6 * PIECE)]


async def test_requests_stay_below_the_span_size(peer, monkeypatch):
    monkeypatch.setattr(module, "SPAN_BYTES", 2 * PIECE)
    await peer.list_mirror()
    await peer.fetch()
    await peer.stored()
    assert sorted(peer.objects.ranges) == [
        (start, min(2 * PIECE, len(MADE.log) - start)) for start in range(0, len(MADE.log), 2 * PIECE)
    ]


async def test_a_damaged_piece_is_requested_again_and_the_others_are_kept(peer):
    await peer.list_mirror()
    damaged = bytearray(MADE.log)
    damaged[3 * PIECE] ^= 1
    await peer.objects.put(slice_name(MADE.id, 0), bytes(damaged))
    await peer.fetch()
    holding = peer.node.holdings[MADE.id]
    assert [p for p in range(PIECES) if p not in holding.artifact.held] == [3]
    assert peer.objects.ranges == [(0, len(MADE.log))] + [(3 * PIECE, PIECE)] * (module.MAX_CORRUPT - 1)
    assert peer.node.pieces_corrupt == peer.errors.count == module.MAX_CORRUPT
    assert peer.errors.last == "mirror: piece 3 of 0.1 does not match its hash"
    assert peer.catalog.take_complaints() == [slice_name(MADE.id, 0)]
    assert holding.source is None
    assert peer.replanned == 1
    assert not peer.source._due(MADE.id)
    peer.catalog.avoid(MADE.id, 0.0)
    await peer.objects.put(slice_name(MADE.id, 0), MADE.log)
    await peer.fetch()
    await peer.stored()
    assert peer.errors.last is None


async def test_a_missing_slice_is_reported_and_tried_again(peer):
    await peer.list_mirror()
    await peer.objects.remove([slice_name(MADE.id, 0)])
    fetching = asyncio.create_task(peer.fetch())
    await until(lambda: peer.errors.count >= 2)
    assert peer.catalog.take_complaints() == [slice_name(MADE.id, 0)]
    await peer.objects.put(slice_name(MADE.id, 0), MADE.log)
    await fetching
    await peer.stored()


async def test_an_artifact_that_the_hub_never_stored_is_not_opened(peer):
    await peer.list_mirror(durable=b"")
    await peer.fetch()
    assert peer.errors.count == module.MAX_CORRUPT
    assert "has no durable record" in str(peer.errors.last)
    assert peer.catalog.take_complaints() == [tail_name(MADE.id)]
    assert peer.node.holdings == {}
    assert peer.objects.ranges == []


async def test_an_artifact_with_another_source_is_not_requested(peer):
    await peer.list_mirror()
    peer.hold([0])
    holding, parent = peer.node.holdings[MADE.id], Recorder(live=True)
    holding.receive_from(parent)
    await peer.fetch()
    assert holding.source is parent
    with pytest.raises(RetryableError, match="another source"):
        await peer.source.fetch_part(MADE.id, Excerpt(frozenset({0})))
    assert peer.objects.ranges == []


async def test_pieces_of_an_artifact_that_was_called_off_are_dropped(peer):
    await peer.list_mirror()
    peer.objects.on_range = lambda: peer.node.abort(peer.node.holdings[MADE.id])
    await peer.fetch()
    assert peer.node.holdings == {}
    assert peer.source.bytes_received == 0


async def test_no_request_begins_while_the_disk_is_behind(peer):
    await peer.list_mirror()
    peer.node.paused = True
    fetching = asyncio.create_task(peer.fetch())
    await until(lambda: MADE.id in peer.node.holdings)
    for _ in range(50):
        await asyncio.sleep(0)
    assert peer.objects.ranges == []
    peer.node.paused = False
    await fetching
    await peer.stored()


async def test_a_part_of_an_artifact_is_the_pieces_of_its_cells(peer):
    await peer.list_mirror()
    peer.node.excerpts.add(MADE.id)
    wanted = Excerpt(frozenset({3}))
    async with asyncio.timeout(LIMIT_S):
        await peer.source.fetch_part(MADE.id, wanted)
    holding = peer.node.holdings[MADE.id]
    pieces = sorted(wanted.pieces(holding.assembly))
    assert pieces == list(range(9000 // PIECE, PIECES))
    assert [p for p in range(PIECES) if p in holding.stored] == pieces
    assert holding.log.read(pieces[0] * PIECE, PIECE) == MADE.log[pieces[0] * PIECE :][:PIECE]
    assert holding.source is None
    assert MADE.id not in peer.finished
