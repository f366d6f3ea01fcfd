"""A node: the artifacts it holds, its parent and its children. Hub and peer are both one.

Promises: a piece goes on to the children the moment its hash has matched, while it is written and decoded elsewhere; what is in memory is
bounded (write backlog, piece cache) whatever the payload; a slow child never slows the receiving, only a slow disk does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from p2pcast import limits
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.records import Open
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.relay.artifact import Artifact
from p2pcast.relay.holding import Holding, Sender
from p2pcast.relay.pieces import PieceSet
from p2pcast.store.journal import Kind
from p2pcast.store.log import Log
from p2pcast.store.writeback import BACKLOG_HIGH_BYTES, BACKLOG_LOW_BYTES, WriteBack

if TYPE_CHECKING:
    from p2pcast.relay.downstream import Downstream
    from p2pcast.relay.upstream import Upstream

CACHE_BYTES = 16 * limits.MIB
"""Pieces kept in memory for children, the newest ones; older ones come from the store."""
DISK_THREADS = 2
"""One for writing, one for children that read old pieces."""


class NodeOwner(Protocol):
    """What a hub or a peer wants to know of its node. Called on the loop."""

    def make_log(self, open_: Open, layout: Layout) -> Log:
        """Where an artifact that comes in is put. Raises LocalError."""

    def on_opened(self, holding: Holding) -> None: ...
    def on_complete(self, holding: Holding) -> None:
        """Sealed, and every piece is in the log."""

    def on_aborted(self, holding: Holding) -> None:
        """Its log is the owner's to remove."""

    def on_offered(self, upstream: Upstream) -> None:
        """A parent said what it has (``upstream.offers``)."""

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None: ...


class PieceCache:
    """The newest pieces, bounded in bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._pieces: OrderedDict[tuple[bytes, int], bytes | memoryview] = OrderedDict()
        self.most_bytes = most_bytes
        self._bytes = 0

    def put(self, artifact: bytes, index: int, payload: bytes | memoryview) -> None:
        if (artifact, index) in self._pieces:
            return
        self._pieces[artifact, index] = payload
        self._bytes += len(payload)
        while self._bytes > self.most_bytes:
            _, old = self._pieces.popitem(last=False)
            self._bytes -= len(old)

    def get(self, artifact: bytes, index: int) -> bytes | memoryview | None:
        return self._pieces.get((artifact, index))


class Node:
    """``run_key`` is the run's public key: nothing that it did not sign comes in."""

    def __init__(self, owner: NodeOwner, ident: bytes, run_key: bytes) -> None:
        self.owner = owner
        self.ident = ident
        self.run_key = run_key
        self.layouts: dict[bytes, Layout] = {}
        self.holdings: dict[bytes, Holding] = {}
        self.path: list[bytes] = [ident]
        """Nodes from the hub to here."""
        self.downstream: Downstream | None = None
        self.upstreams: set[Upstream] = set()
        self.bytes_received = 0
        self.bytes_duplicate = 0
        self.pieces_corrupt = 0
        self.garbled: Counter[bytes] = Counter()
        """Node → pieces from it that were not what they ought to be."""
        self.pulled: set[bytes] = set()
        """Artifacts that are asked for piece by piece, of several nodes: a parent is not to send them as well."""
        self.excerpts: set[bytes] = set()
        """Of those that are pulled, the artifacts of which a part is wanted: ``Holding.excerpt``."""
        self.is_sealed: Callable[[bytes], bool] = lambda artifact: False
        """Whether the hub is known to have sealed an artifact: then no parent can call it off."""
        self.is_listed: Callable[[bytes], bool] = lambda artifact: True
        """Whether the hub has said that it has an artifact; also true while the hub is not heard."""
        self.busy = False
        """A version is on its way through here: pulling gives way, both what others pull from us and what we pull."""
        self.on_busy: list[Callable[[], None]] = []
        """Called when that has changed."""
        self.cache = PieceCache(CACHE_BYTES)
        self.disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="p2pcast-disk")
        self.writeback = WriteBack(self.disk, self._on_stored, self._on_store_failed)
        self._fresh: dict[tuple[bytes, int], memoryview] = {}
        """Pieces of the read that is being worked on."""
        self.paused = False
        """Not reading from parents, because the disk is behind."""
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the store does: the daemon ends with it."""

    async def run(self) -> None:
        """Until cancelled, or until the store fails (then its LocalError is raised)."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.writeback.run(), name="writeback")
            group.create_task(self._fail(), name="store errors")

    async def _fail(self) -> None:
        await self.error

    def close(self) -> None:
        for upstream in list(self.upstreams):
            upstream.link.close()
        for holding in self.holdings.values():
            holding.log.close()
        self.disk.shutdown(wait=False, cancel_futures=True)
        if self.error.done() and not self.error.cancelled():
            self.error.exception()

    # -- artifacts

    def add_layout(self, layout: Layout) -> None:
        self.layouts[layout.layout_id] = layout

    def open(self, open_signed: bytes, source: Upstream | Sender | None, log: Log | None = None) -> Holding:
        """A new artifact, from a parent or (with ``log``) made here. Raises IntegrityError, LocalError."""
        record = Open.from_signed(open_signed, self.run_key)
        known = self.holdings.get(record.artifact)
        if known is not None:
            return known
        layout = self.layouts.get(record.layout)
        if layout is None:
            raise IntegrityError(f"artifact {record.artifact.hex()} has a layout that was never sent")
        if source is not None:
            self._bound_strays()
        artifact = Artifact(Assembly(open_signed, self.run_key, layout))
        excerpt = record.artifact in self.excerpts
        pushed = not excerpt and (source is None or source.pushes(record.artifact))
        holding = Holding(
            artifact,
            log or self._make_log(record, layout),
            source=source if pushed else None,
            made=log is not None,
            excerpt=excerpt,
        )
        holding.opened_at = asyncio.get_running_loop().time()
        self.holdings[record.artifact] = holding
        if source is not None:
            self.writeback.note(holding.id, holding.log, (Kind.OPEN, bytes(open_signed)))
        self.owner.on_opened(holding)
        if self.downstream is not None and not excerpt:
            self.downstream.opened(holding, push=pushed)
        self.look()
        return holding

    def _bound_strays(self) -> None:
        """What the hub does not list may be signed and long gone: nobody confirms it, and retention does not see it. The oldest gives way."""
        strays = [
            h for h in self.holdings.values()
            if not (h.made or h.excerpt or h.durable.is_set() or h.id in self.pulled or self.is_listed(h.id))
        ]  # fmt: skip
        for holding in strays[: max(0, len(strays) - limits.MAX_STRAYS + 1)]:
            self.abort(holding)

    def look(self) -> None:
        """Whether a version is on its way through here, now: told to those who give way to it."""
        incoming = (h for h in self.holdings.values() if h.completed_at is None and not h.aborted)
        busy = (
            any(h.made or (h.source is not None and h.source.live) for h in incoming)
            or any(upstream.expecting for upstream in self.upstreams)
            or (self.downstream is not None and self.downstream.pushing)
        )
        if busy != self.busy:
            self.busy = busy
            for changed in self.on_busy:
                changed()

    def _make_log(self, record: Open, layout: Layout) -> Log:
        try:
            return self.owner.make_log(record, layout)
        except LocalError as error:
            # A full disk is no fault of the parent: another one would meet it too.
            if not self.error.done():
                self.error.set_exception(error)
            raise

    def add_stored(self, assembly: Assembly, log: Log, *, push: bool = False) -> Holding:
        """An artifact that lies whole in the store; with ``push`` it is new, and live children get it."""
        every = assembly.pieces
        holding = Holding(Artifact(assembly, PieceSet(every)), log, PieceSet(every), finished=True)
        holding.confirmed.set()
        holding.durable.set()
        holding.opened_at = holding.completed_at = asyncio.get_running_loop().time()
        self.add_layout(assembly.layout)
        self.holdings[holding.id] = holding
        if push and self.downstream is not None:
            self.downstream.opened(holding, push=True)
            self.look()
        return holding

    def add_partial(self, assembly: Assembly, log: Log, held: PieceSet) -> Holding:
        """What an earlier process received of an artifact; it may be all of it. Nobody is asked for the rest before somebody wants it."""
        holding = Holding(Artifact(assembly, held), log, held.copy(), idle=True)
        holding.had_bytes = held.count * assembly.open.piece
        holding.opened_at = asyncio.get_running_loop().time()
        self.add_layout(assembly.layout)
        self.holdings[holding.id] = holding
        if assembly.confirmed:
            holding.confirmed.set()
        if holding.artifact.complete:
            holding.idle = False
            self._completed(holding)
        return holding

    def add_batch(self, holding: Holding, signed: bytes) -> None:
        known = holding.assembly.batches
        if holding.assembly.add_batch(signed):
            holding.progress.set()
        if holding.assembly.batches > known:
            self.writeback.note(holding.id, holding.log, (Kind.BATCH, bytes(signed)))
        if holding.artifact.complete:
            self._completed(holding)

    def add_local(self, holding: Holding, signed: bytes) -> None:
        """The next batch of our own, whose pieces are in the log already."""
        first = holding.assembly.linked_pieces
        self.add_batch(holding, signed)
        for index in range(first, holding.assembly.linked_pieces):
            holding.artifact.held.add(index)
            holding.stored.add(index)
            if self.downstream is not None:
                self.downstream.line_up(holding, index)
        if self.downstream is not None:
            self.downstream.pump()
        holding.progress.set()

    def add_piece(self, holding: Holding, index: int, payload: memoryview) -> None:
        """A piece that was verified and is new. ``forward`` follows, once all that came with it is here."""
        self.bytes_received += len(payload)
        assembly = holding.assembly
        self.writeback.submit(holding.id, holding.log, assembly.open.piece, index, payload)
        if self.downstream is not None and self.downstream.line_up(holding, index):
            self._fresh[holding.id, index] = payload
        if self.writeback.backlog_bytes > BACKLOG_HIGH_BYTES and not self.paused:
            self.paused = True
            for upstream in self.upstreams:
                upstream.link.pause_reading()
        if holding.artifact.complete:
            self._completed(holding)

    def forward(self) -> None:
        """Hand the new pieces to the children; what they can't take yet is kept in memory for them."""
        if self._fresh and self.downstream is not None:
            if self.downstream.pump():
                for (artifact, index), payload in self._fresh.items():
                    self.cache.put(artifact, index, payload)
            self._fresh.clear()

    def seal(self, holding: Holding, signed: bytes) -> None:
        if not holding.assembly.sealed:
            self.writeback.note(holding.id, holding.log, (Kind.MANIFEST, bytes(signed)))
        holding.assembly.add_manifest(signed)
        if holding.assembly.confirmed:
            holding.confirmed.set()
        if holding.artifact.complete:
            self._completed(holding)

    def confirm(self, holding: Holding, signed: bytes) -> None:
        """The hub's durable record, from the hub itself or on its way from there: told to the children before anything else. Raises IntegrityError."""
        known = holding.assembly.durable_signed
        holding.assembly.add_durable(signed)
        if known is None:
            if not holding.made:
                self.writeback.note(holding.id, holding.log, (Kind.DURABLE, bytes(signed)))
            if self.downstream is not None:
                self.downstream.confirmed(holding)
            holding.confirmed.set()

    def _completed(self, holding: Holding) -> None:
        """Everything is verified: children may have the seal; the log may still be on its way to disk."""
        if holding.excerpt:
            self.writeback.flush()
            return
        if holding.completed_at is None:
            holding.completed_at = asyncio.get_running_loop().time()
            holding.source = None
            self.writeback.flush()
            if self.downstream is not None:
                self.downstream.sealed(holding)
        self._finish(holding)

    def abort(self, holding: Holding) -> None:
        """It will never be sealed: forget it, and tell the children."""
        if self.holdings.pop(holding.id, None) is None:
            return
        if self.downstream is not None:
            self.downstream.aborted(holding)
        for upstream in self.upstreams:
            upstream.wanted.discard(holding.id)
        holding.end()
        self.owner.on_aborted(holding)

    def give_up(self, holding: Holding) -> None:
        """It leads nowhere from here: who decodes it stops, and children get it elsewhere. Its log is the caller's to remove."""
        if self.holdings.pop(holding.id, None) is None:
            return
        if self.downstream is not None:
            self.downstream.gone(holding)
        holding.end()

    def forget(self, artifact: bytes) -> None:
        """Retention removed it from the store."""
        holding = self.holdings.pop(artifact, None)
        if holding is not None:
            holding.log.close()
        for upstream in self.upstreams:
            upstream.forgotten(artifact)
        if self.downstream is not None:
            for child in self.downstream.children.values():
                child.spared.discard(artifact)

    def wants(self) -> list[Holding]:
        """What is incomplete and has no source, or is whole and not known to be durable at the hub."""
        return [
            h for h in self.holdings.values()
            if not (h.idle or h.excerpt) and h.source is None and h.id not in self.pulled
            and (not h.confirmed.is_set() if h.completed_at is not None else not h.finished)
        ]  # fmt: skip

    def payload(self, holding: Holding, index: int) -> bytes | memoryview | None:
        """A held piece, if it is in memory."""
        fresh = self._fresh.get((holding.id, index))
        if fresh is not None:
            return fresh
        return self.cache.get(holding.id, index) or self.writeback.get(holding.id, index)

    def set_path(self, path: list[bytes]) -> None:
        """The parent's path changed."""
        self.path = [*path, self.ident]
        if self.downstream is not None:
            self.downstream.path_changed()

    # -- store

    def _on_stored(self, artifact: bytes, pieces: list[int]) -> None:
        holding = self.holdings.get(artifact)
        if holding is not None:
            for index in pieces:
                holding.stored.add(index)
            holding.progress.set()
            self._finish(holding)
        self._listen_again()

    def _listen_again(self) -> None:
        if self.paused and self.writeback.backlog_bytes < BACKLOG_LOW_BYTES:
            self.paused = False
            for upstream in self.upstreams:
                upstream.link.resume_reading()

    def _on_store_failed(self, artifact: bytes, error: P2PCastError) -> None:
        if artifact in self.holdings and not self.error.done():
            self.error.set_exception(error if isinstance(error, LocalError) else LocalError(str(error)))
        self._listen_again()

    def _finish(self, holding: Holding) -> None:
        if (
            not (holding.finished or holding.excerpt)
            and holding.artifact.complete
            and holding.stored.count == holding.assembly.pieces
        ):
            holding.finished = True
            holding.progress.set()
            self.owner.on_complete(holding)
