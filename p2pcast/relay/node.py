"""A node: the artifacts that it has, its parents and its children. A hub has one node, and so does a peer.

Promises:

- A piece is forwarded to the children as soon as its hash has matched, while other code writes and decodes it.
- Memory is bounded (write backlog, piece cache) whatever the payload.
- A slow child never slows down receiving; only a slow disk does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.piece_set import PieceSet
from p2pcast.artifact.signed_records import Open
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.ground.observers import Observers
from p2pcast.ground.version import Version
from p2pcast.process.shortages import shortage
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.holding import ArtifactSource, Holding
from p2pcast.relay.holding_state import HoldingState
from p2pcast.relay.tuning import CACHE_BYTES, MAX_PULLS
from p2pcast.relay.verified_pieces import VerifiedPieces
from p2pcast.store.artifact_journal import JournalKind
from p2pcast.store.artifact_log import ArtifactLog
from p2pcast.store.write_behind import BACKLOG_HIGH_BYTES, BACKLOG_LOW_BYTES, WriteBehind
from p2pcast.transport.link import Link

DISK_THREADS = 2
"""One thread writes; the other reads old pieces for children."""


class Parent(ArtifactSource, Protocol):
    """The part of the link to one parent (``Upstream``) that its node and the node's owner use."""

    beside: bool
    """The node at the other end is not a parent, but a peer that has also lost the hub."""
    link: Link
    offers: dict[bytes, tuple[str, Version | None, Version, bool]]
    """Artifact -> kind, base, version, complete: the parent's own list."""
    wanted: set[bytes]
    """Artifacts requested from the parent that it has not sealed yet."""

    @property
    def expecting(self) -> bool:
        """Whether the hub has opened an artifact that the parent has not opened yet."""

    def want(self, artifact: bytes) -> None:
        """Ask the parent for the artifact, unless another source sends it."""

    def skip(self, artifact: bytes) -> None:
        """Ask the parent not to push the artifact."""

    def forgotten(self, artifact: bytes) -> None:
        """This node no longer holds the artifact."""

    def want_newer(self) -> None:
        """Ask for every offered version that is newer than all that this node holds."""


class NodeObserver(Protocol):
    """A part of a hub or peer that follows what happens at the node. Called on the event loop."""

    def on_opened(self, holding: Holding) -> None: ...
    def on_complete(self, holding: Holding) -> None:
        """The artifact is sealed, and every piece is in the log."""

    def on_aborted(self, holding: Holding) -> None:
        """The observer removes the holding's log."""

    def on_offered(self, upstream: Parent) -> None:
        """A parent announced its artifacts (``offers``)."""

    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None: ...


class NodeOwner(NodeObserver, Protocol):
    """The hub or peer that owns a node."""

    def make_log(self, open_: Open, layout: Layout, *, excerpt: bool) -> ArtifactLog:
        """Return the log for an incoming artifact. ``excerpt``: only part of it is wanted. Raises LocalError."""


class PieceCache:
    """The newest pieces, up to a number of bytes."""

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
    """``run_key``: the run's public key. Artifacts that it has not signed are rejected."""

    def __init__(
        self,
        owner: NodeOwner,
        ident: bytes,
        run_key: bytes,
        *,
        max_pulls: int = MAX_PULLS,
        is_sealed: Callable[[bytes], bool] = lambda artifact: False,
        is_listed: Callable[[bytes], bool] = lambda artifact: True,
    ) -> None:
        """``max_pulls``: children that may pull at one time. ``is_sealed``: whether the hub is known to have sealed an
        artifact; no parent can call such an artifact off. ``is_listed``: whether the hub's catalog lists an artifact;
        always true while the hub is out of reach.
        """
        self.owner = owner
        self.ident = ident
        self.run_key = run_key
        self.layouts: dict[bytes, Layout] = {}
        self.holdings: dict[bytes, Holding] = {}
        self.path: list[bytes] = [ident]
        """Ids of the nodes from the hub to this one."""
        self.upstreams: set[Parent] = set()
        self.bytes_received = 0
        self.bytes_duplicate = 0
        self.pieces_corrupt = 0
        self.garbled: Counter[bytes] = Counter()
        """Node id -> number of its pieces whose hash did not match."""
        self.pulled: set[bytes] = set()
        """Artifacts that are pulled piece by piece from several nodes. No parent may send them as well."""
        self.excerpts: set[bytes] = set()
        """Pulled artifacts of which only a part is wanted: their holdings begin as ``HoldingState.EXCERPT``."""
        self.is_sealed = is_sealed
        self.is_listed = is_listed
        self.busy = False
        """A version is on its way through this node: pulling gives way, from this node and by this node."""
        self.busy_observers: Observers[[]] = Observers()
        """Called when ``busy`` has changed."""
        self.damaged: Observers[[Holding]] = Observers()
        """Called with an artifact of which the disk has damaged or lost a piece."""
        self.cache = PieceCache(CACHE_BYTES)
        self.disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="p2pcast-disk")
        self.writeback = WriteBehind(self.disk, self._on_stored, self._on_store_failed)
        self._fresh: dict[tuple[bytes, int], memoryview] = {}
        """(artifact, piece) -> payload of the read that is being handled now."""
        self.paused = False
        """This node has stopped reading from parents, because its disk is behind."""
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the store fails: the daemon exits with that error, unless the machine is short of a resource."""
        self.downstream = Downstream(self, max_pulls)

    async def run(self) -> None:
        """Run until cancelled, or until the store fails; then raise its LocalError. After a resource shortage it may be
        called again.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.writeback.run(), name="writeback")
            group.create_task(self._fail(), name="store errors")

    async def _fail(self) -> None:
        await asyncio.shield(self.error)

    def close(self) -> None:
        self.downstream.close()
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

    def open(self, open_signed: bytes, source: ArtifactSource | None, log: ArtifactLog | None = None) -> Holding:
        """Begin to hold an artifact from ``source``, or (with ``log``) one made here. An artifact that is held already
        stays as it is. Raises IntegrityError, LocalError.
        """
        record = Open.from_signed(open_signed, self.run_key)
        known = self.holdings.get(record.artifact)
        if known is not None:
            return known
        layout = self.layouts.get(record.layout)
        if layout is None:
            raise IntegrityError(f"artifact {record.artifact.hex()} has a layout that was never sent")
        if source is not None:
            self._bound_strays()
        artifact = VerifiedPieces(Assembly(open_signed, self.run_key, layout))
        excerpt = record.artifact in self.excerpts
        pushed = not excerpt and (source is None or source.pushes(record.artifact))
        sends = source if pushed else None
        if log is not None:
            state = HoldingState.MAKING
        elif excerpt:
            state = HoldingState.EXCERPT
        else:
            state = HoldingState.WAITING if sends is None else HoldingState.RECEIVING
        now = asyncio.get_running_loop().time()
        holding = Holding(
            artifact, log or self._make_log(record, layout, excerpt=excerpt), state, source=sends, opened_at=now
        )
        self.holdings[record.artifact] = holding
        if source is not None:
            self.writeback.note(holding.id, holding.log, (JournalKind.OPEN, bytes(open_signed)))
        self.owner.on_opened(holding)
        if not excerpt:
            self.downstream.opened(holding, push=pushed)
        self.update_busy()
        return holding

    def _bound_strays(self) -> None:
        """Bound the number of holdings that the hub does not list. Such an artifact may be signed and long gone: no hub
        confirms it, and retention does not see it. The oldest are aborted.
        """
        strays = [
            h for h in self.holdings.values()
            if not (h.made or h.excerpt or h.durable or h.id in self.pulled or self.is_listed(h.id))
        ]  # fmt: skip
        for holding in strays[: max(0, len(strays) - limits.MAX_UNLISTED + 1)]:
            self.abort(holding)

    def update_busy(self) -> None:
        """Check whether a version is passing through this node, and notify ``busy_observers`` of a change."""
        busy = (
            any(
                h.state is HoldingState.MAKING or (h.source is not None and h.source.live)
                for h in self.holdings.values()
            )
            or any(upstream.expecting for upstream in self.upstreams)
            or self.downstream.pushing
        )
        if busy != self.busy:
            self.busy = busy
            self.downstream.busy_changed()
            self.busy_observers.notify()

    def _make_log(self, record: Open, layout: Layout, *, excerpt: bool) -> ArtifactLog:
        try:
            return self.owner.make_log(record, layout, excerpt=excerpt)
        except LocalError as error:
            # Not the parent's fault, and another parent would not help. After a shortage the parent's link is dialled
            # again; any other error ends the daemon.
            if shortage(error) is None and not self.error.done():
                self.error.set_exception(error)
            raise

    def add_stored(self, assembly: Assembly, log: ArtifactLog, *, push: bool = False) -> Holding:
        """Hold an artifact that is complete in the store. ``push``: it is new, so live children get it."""
        every = assembly.pieces
        now = asyncio.get_running_loop().time()
        pieces = VerifiedPieces(assembly, PieceSet(every))
        holding = Holding(pieces, log, HoldingState.DURABLE, stored=PieceSet(every), opened_at=now)
        self.add_layout(assembly.layout)
        self.holdings[holding.id] = holding
        if push:
            self.downstream.opened(holding, push=True)
            self.update_busy()
        return holding

    def add_partial(self, assembly: Assembly, log: ArtifactLog, held: PieceSet) -> Holding:
        """Hold the part of an artifact that an earlier process received; it may be all. The rest is not asked for
        before ``Holding.want``.
        """
        holding = Holding(
            VerifiedPieces(assembly, held),
            log,
            HoldingState.IDLE,
            stored=held.copy(),
            opened_at=asyncio.get_running_loop().time(),
            had_bytes=held.count * assembly.open.piece,
        )
        self.add_layout(assembly.layout)
        self.holdings[holding.id] = holding
        if holding.artifact.complete:
            self._completed(holding)
        return holding

    def add_batch(self, holding: Holding, signed: bytes) -> None:
        known = holding.assembly.batches
        holding.add_batch(signed)
        if holding.assembly.batches > known:
            self.writeback.note(holding.id, holding.log, (JournalKind.BATCH, bytes(signed)))
        if holding.artifact.complete:
            self._completed(holding)

    def add_local(self, holding: Holding, signed: bytes) -> None:
        """Add the next batch of an artifact made here, whose pieces are in the log already."""
        first = holding.assembly.linked_pieces
        self.add_batch(holding, signed)
        pieces = range(first, holding.assembly.linked_pieces)
        holding.note_made(pieces)
        for index in pieces:
            self.downstream.line_up(holding, index)
        self.downstream.pump()

    def add_piece(self, holding: Holding, index: int, payload: memoryview) -> None:
        """Take a new, verified piece. Call ``forward`` once the whole read has been handled."""
        self.bytes_received += len(payload)
        self.writeback.submit(holding.id, holding.log, holding.open.piece, index, payload)
        if self.downstream.line_up(holding, index):
            self._fresh[holding.id, index] = payload
        if self.writeback.backlog_bytes > BACKLOG_HIGH_BYTES and not self.paused:
            self.paused = True
            for upstream in self.upstreams:
                upstream.link.pause_reading()
        if holding.artifact.complete:
            self._completed(holding)

    def forward(self) -> None:
        """Send the new pieces to the children. Pieces that their sockets do not take yet stay in memory."""
        if self._fresh:
            if self.downstream.pump():
                for (artifact, index), payload in self._fresh.items():
                    self.cache.put(artifact, index, payload)
            self._fresh.clear()

    def seal(self, holding: Holding, signed: bytes) -> None:
        if not holding.assembly.sealed:
            self.writeback.note(holding.id, holding.log, (JournalKind.MANIFEST, bytes(signed)))
        holding.add_manifest(signed)
        if holding.artifact.complete:
            self._completed(holding)

    def confirm(self, holding: Holding, signed: bytes) -> None:
        """Add the hub's durable record, which may arrive through a parent, and inform the children at once. Raises
        IntegrityError.
        """
        if holding.add_confirmation(signed):
            if not holding.made:
                self.writeback.note(holding.id, holding.log, (JournalKind.DURABLE, bytes(signed)))
            self.downstream.confirmed(holding)

    def _completed(self, holding: Holding) -> None:
        """Handle that everything is verified: children get the seal. The log may not be on disk yet."""
        if holding.excerpt:
            self.writeback.flush()
            return
        if holding.incomplete:
            holding.verify(asyncio.get_running_loop().time())
            self.writeback.flush()
            self.downstream.sealed(holding)
        self._finish(holding)

    def abort(self, holding: Holding) -> None:
        """Drop a holding whose artifact will never be sealed, and inform the children."""
        if self.holdings.get(holding.id) is not holding:
            return
        del self.holdings[holding.id]
        self.downstream.aborted(holding)
        for upstream in self.upstreams:
            upstream.wanted.discard(holding.id)
        holding.abort()
        self.owner.on_aborted(holding)

    def give_up(self, holding: Holding) -> None:
        """Drop a holding that this node no longer needs. Decoding stops, children get the artifact elsewhere, and the
        caller removes the log.
        """
        if self.holdings.get(holding.id) is not holding:
            return
        del self.holdings[holding.id]
        self.downstream.gone(holding)
        holding.abort()

    def forget(self, artifact: bytes) -> None:
        """Drop an artifact that retention removed from the store."""
        holding = self.holdings.pop(artifact, None)
        if holding is not None:
            holding.log.close()
        for upstream in self.upstreams:
            upstream.forgotten(artifact)
        self.downstream.forgotten(artifact)

    def wants(self) -> list[Holding]:
        """Holdings that need a source, or are complete and not confirmed by the hub. A new parent is asked for them."""
        return [
            h
            for h in self.holdings.values()
            if h.offered and h.id not in self.pulled and (h.needs_source or (h.complete and not h.confirmed))
        ]

    def payload(self, holding: Holding, index: int) -> bytes | memoryview | None:
        """Return a held piece if it is in memory, else None."""
        fresh = self._fresh.get((holding.id, index))
        if fresh is not None:
            return fresh
        return self.cache.get(holding.id, index) or self.writeback.get(holding.id, index)

    def count_duplicate(self, size: int) -> None:
        """Count ``size`` bytes of a piece that arrived a second time."""
        self.bytes_duplicate += size

    def count_corrupt(self, sender: bytes | None) -> None:
        """Count a piece that did not match its hash. ``sender``: a node, or None for a mirror."""
        self.pieces_corrupt += 1
        if sender is not None:
            self.garbled[sender] += 1

    def add_upstream(self, upstream: Parent) -> None:
        """Register the link to a parent, which is attaching."""
        self.upstreams.add(upstream)

    def offers_changed(self, upstream: Parent) -> None:
        """Inform the owner that a parent has announced its artifacts, or no longer has what it announced."""
        self.owner.on_offered(upstream)

    def upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None:
        """Handle the end of a link to a parent. Artifacts that it was sending no longer have a source."""
        self.upstreams.discard(upstream)
        for holding in self.holdings.values():
            holding.lose_source(upstream)
        self.owner.on_upstream_lost(upstream, error)

    def set_path(self, path: list[bytes]) -> None:
        """Set the path from the parent's, and inform the children."""
        self.path = [*path, self.ident]
        self.downstream.path_changed()

    # -- store

    def _on_stored(self, artifact: bytes, pieces: list[int]) -> None:
        holding = self.holdings.get(artifact)
        if holding is not None:
            holding.note_stored(pieces)
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
        if holding.state is HoldingState.VERIFIED and holding.all_stored:
            holding.finish()
            self.owner.on_complete(holding)

    def validate(self) -> None:
        """Raise AssertionError naming the first broken invariant. Invariants hold between any two events."""
        for artifact, holding in self.holdings.items():
            assert artifact == holding.id, f"{holding.open.version} is held under another artifact's id"
            assert not holding.aborted, f"{holding.open.version} was aborted and is still held"
            assert not (holding.state is HoldingState.VERIFIED and holding.all_stored), (
                f"{holding.open.version} is whole in the log, and the owner was not told"
            )
            holding.validate()
