"""Fetches versions from the run's mirror, an object store, while the hub is unreachable (docs/guides/mirror.md).

Guarantees:

- Only records signed with the run's key, which the token pins, are accepted.
- A piece from the mirror is verified like a piece from a peer, before it is written or forwarded.
- A mirror with older versions never takes an engine back to one.
- A failed request affects only that request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from prometheus_client.core import Metric

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.signed_records import KEY_BYTES, run_id
from p2pcast.codec.layout import Layout
from p2pcast.daemon.http_server import Document
from p2pcast.ground import limits
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import IntegrityError, P2PCastError, RefusedError, RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror.object_names import KEY, slice_name
from p2pcast.mirror.object_store import ObjectMissingError, Objects
from p2pcast.mirror.upload_plan import PieceSpan, spans
from p2pcast.process.events import Events
from p2pcast.relay.artifact_excerpt import Excerpt
from p2pcast.relay.holding import ArtifactReceiver, Holding
from p2pcast.relay.verified_pieces import PieceOffer
from rollout_node import peer_metrics
from rollout_node.control.artifact_catalog import Entry
from rollout_node.sync.mirror_catalog import MirrorCatalog
from rollout_node.sync.source_choice import due_from_mirror, needs_source
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.mirror")

AT_ONCE = 8
"""Number of concurrent requests."""
SPAN_BYTES = 2 * limits.MIB
"""Size of one request; `AT_ONCE` of them bound the memory in use before data reaches the disk."""
AHEAD = 4
"""Number of the path's artifacts that are fetched concurrently."""
POLL_MIN_S = 1.0
POLL_MAX_S = 10.0
"""Bounds in seconds on the time between listings; it grows after each listing without news."""
RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0
GONE_S = 3.0
"""Seconds for which the hub must be unreachable before the mirror is used."""
BATCHES_AT_ONCE = 64
"""Number of batches added before the loop serves other tasks."""
CHECK_S = 0.25
"""Seconds between two checks whether the swarm is lost, or an artifact is due from the mirror."""
KEY_TRIES = 5
MAX_CORRUPT = 5
"""Number of failed integrity checks after which an artifact is avoided for `AVOID_S` seconds."""
AVOID_S = 60.0


class MirrorErrors:
    """Failed requests to the mirror. It counts and shows them, and reports each new message once."""

    def __init__(self, events: Events) -> None:
        self.last: str | None = None
        """The last failure; None after a successful request."""
        self.count = 0
        self._events = events

    def note(self, error: P2PCastError) -> None:
        self.count += 1
        if self.last != str(error):
            self.last = str(error)
            self._events.emit("mirror_failed", why=self.last)
            logger.warning("%s", error)

    def clear(self) -> None:
        """Called after a successful request."""
        self.last = None


async def read_run_key(objects: Objects, run: bytes, errors: MirrorErrors) -> bytes:
    """Read the run's public key from the mirror. Raises RefusedError (a different run's key), RetryableError."""
    backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, uniform)
    while True:
        try:
            key = await objects.get(KEY, KEY_BYTES)
            break
        except ObjectMissingError:
            raise RetryableError(f"{objects.url} holds nothing of this run yet") from None
        except RetryableError as error:
            if backoff.attempts == KEY_TRIES - 1:
                raise
            errors.note(error)
        await asyncio.sleep(backoff.next_s())
    if len(key) != KEY_BYTES or run_id(key) != run:
        raise RefusedError(f"{objects.url}: its key is not the one that the token names")
    return key


class MirroringNode(ArtifactReceiver, Protocol):
    """The part of the node that receives from a mirror."""

    @property
    def disk(self) -> ThreadPoolExecutor: ...


@dataclass(eq=False, repr=False)
class MirrorSource:
    """``swarm_lost``: whether the hub is unreachable. ``has_parent``: whether a parent feeds this peer. ``on_listed``
    is called after each listing of the mirror. ``at_once``: whether to use the mirror without waiting for the hub.
    """

    objects: Objects
    catalog: MirrorCatalog
    errors: MirrorErrors
    node: MirroringNode
    events: Events
    room: asyncio.Semaphore
    _: KW_ONLY
    swarm_lost: Callable[[], bool]
    has_parent: Callable[[], bool]
    planner: VersionPlanner
    on_listed: Callable[[], None]
    at_once: bool
    bytes_received: int = field(init=False, default=0)
    _news: Wakeup = field(init=False, default_factory=Wakeup)
    _corrupt_counts: Counter[bytes] = field(init=False, default_factory=Counter)

    # -- p2pcast.relay.holding.ArtifactSource

    live = False

    def pushes(self, artifact: bytes) -> bool:
        return True

    # -- for the peer

    @property
    def entries(self) -> dict[bytes, Entry]:
        """Artifacts that are complete on the mirror, from signed manifests."""
        return self.catalog.entries

    @property
    def in_use(self) -> bool:
        return self.catalog.in_use

    def status(self) -> Document:
        newest = max((e.version for e in self.entries.values()), default=None)
        return {
            "url": self.objects.url,
            "in_use": self.in_use,
            "version": None if newest is None else str(newest),
            "artifacts": len(self.entries),
            "bytes_received": self.bytes_received,
            "errors": self.errors.count,
            "error": self.errors.last,
        }

    def families(self) -> Iterable[Metric]:
        yield peer_metrics.MIRROR_IN_USE(float(self.in_use))
        yield peer_metrics.MIRROR_ARTIFACTS(len(self.entries))
        yield peer_metrics.MIRROR_RECEIVED(self.bytes_received)
        yield peer_metrics.MIRROR_ERRORS(self.errors.count)

    async def run(self) -> None:
        """Follow the mirror whenever the swarm is lost, until cancelled."""
        while True:
            await self._wait_for_swarm(lost=True)
            self._use(True)
            work = asyncio.create_task(self._follow(), name="mirror")
            try:
                await self._wait_for_swarm(lost=False, work=work)
            finally:
                work.cancel()
                await asyncio.wait([work])
            if not work.cancelled():
                work.result()
            self._use(False)

    async def _wait_for_swarm(self, *, lost: bool, work: asyncio.Task[None] | None = None) -> None:
        """Wait until the hub has been unreachable for ``GONE_S``, or is back, or until ``work`` finishes."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while work is None or not work.done():
            if self.swarm_lost() != lost:
                since = loop.time()
            elif not lost or self.at_once or loop.time() - since >= GONE_S:
                self.at_once = False
                return
            await self._news.wait(CHECK_S)

    def _use(self, use: bool) -> None:
        self.catalog.in_use = use
        self.events.emit("mirror_used" if use else "mirror_left")
        logger.info("following %s" if use else "the swarm is back; %s is left", self.objects.url)
        self.planner.replan()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll(), name="mirror's versions")
            group.create_task(self._fetch(), name="mirror's pieces")

    # -- listings

    async def _poll(self) -> None:
        backoff = Backoff(POLL_MIN_S, POLL_MAX_S, uniform, jitter=0.25, factor=1.5)
        while True:
            try:
                news = await self._list()
            except P2PCastError as error:
                self.errors.note(error)
                news = False
            else:
                self.errors.clear()
            if news:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _list(self) -> bool:
        """List the mirror, and return whether it has new artifacts."""
        news, error = await self.catalog.refresh(self.node.run_key)
        self.on_listed()
        self._news.notify()
        if error is not None:
            raise error
        return news

    # -- pieces

    async def _fetch(self) -> None:
        tasks: dict[bytes, asyncio.Task[None]] = {}
        try:
            while True:
                for artifact in [a for a, t in tasks.items() if t.done()]:
                    tasks.pop(artifact).result()
                for edge in self.planner.path()[:AHEAD] if self.planner.begun.is_set() else []:
                    if len(tasks) < AHEAD and edge.artifact not in tasks and self._due(edge.artifact):
                        tasks[edge.artifact] = asyncio.create_task(
                            self._fetch_artifact(edge.artifact), name=f"mirror {edge.version}"
                        )
                        tasks[edge.artifact].add_done_callback(lambda _: self._news.notify())
                await self._news.wait(CHECK_S if tasks else POLL_MIN_S)
        finally:
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values())

    def _due(self, artifact: bytes) -> bool:
        """Whether the mirror has the artifact, and is the source to ask for it."""
        now = asyncio.get_running_loop().time()
        if artifact not in self.entries or self.catalog.is_avoided(artifact, now):
            return False
        return due_from_mirror(
            self.node.holdings.get(artifact),
            pulled=artifact in self.node.pulled,
            has_parent=self.has_parent(),
            listed_for_s=now - self.catalog.seen_at[artifact],
        )

    async def _fetch_artifact(self, artifact: bytes) -> None:
        """Fetch until the artifact is complete, has a different source, or is gone from the mirror."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, uniform)
        holding = None
        try:
            while artifact in self.entries and (holding is None or holding.incomplete):
                try:
                    holding = holding or await self._open(artifact)
                    if holding is None:
                        return
                    await self._fetch_pieces(holding)
                    self.errors.clear()
                except P2PCastError as error:
                    self.errors.note(error)
                    if isinstance(error, IntegrityError) and self._avoid_if_corrupt(artifact):
                        return
                    await asyncio.sleep(backoff.next_s())
        finally:
            if holding is not None:
                holding.lose_source(self)

    def _avoid_if_corrupt(self, artifact: bytes) -> bool:
        """Count a failed integrity check, and return whether the artifact is avoided from now on."""
        self._corrupt_counts[artifact] += 1
        if self._corrupt_counts[artifact] < MAX_CORRUPT:
            return False
        self._corrupt_counts[artifact] = 0
        self.catalog.avoid(artifact, asyncio.get_running_loop().time() + AVOID_S)
        self.planner.replan()
        return True

    async def _open(self, artifact: bytes) -> Holding | None:
        """Put the verified directory into the node. None if a different source is sending the artifact by now."""
        node = self.node

        async def verify(tail: Tail, layout: Layout) -> None:
            assembly = await asyncio.get_running_loop().run_in_executor(node.disk, tail.assembly, layout)
            if not assembly.confirmed:
                raise IntegrityError(
                    f"mirror: the tail of {assembly.open.version} has no durable record: the hub never stored it"
                )

        tail, layout = await self.catalog.directory(artifact, node.run_key, node.layouts, verify)
        if not needs_source(node.holdings.get(artifact)):
            return None
        node.add_layout(layout)
        holding = node.open(tail.open, self)
        holding.receive_from(self)
        for number, signed in enumerate(tail.batches):
            node.add_batch(holding, signed)
            if not number % BATCHES_AT_ONCE:
                await asyncio.sleep(0)
        node.seal(holding, tail.manifest)
        if tail.durable:
            node.confirm(holding, tail.durable)
        return holding

    async def fetch_part(self, artifact: bytes, excerpt: Excerpt) -> None:
        """Fetch a part of an artifact, which the caller has announced as an excerpt. Raises P2PCastError."""
        holding = await self._open(artifact)
        if holding is None:
            raise RetryableError("another source sends the artifact by now")
        try:
            wanted = excerpt.pieces(holding.assembly)
            await self._fetch_pieces(holding, wanted)
            while not all(piece in holding.stored for piece in wanted):
                holding.progress.clear()
                await holding.progress.wait()
        finally:
            holding.lose_source(self)

    async def _fetch_pieces(self, holding: Holding, wanted: Collection[int] | None = None) -> None:
        """Fetch the missing ones of the wanted pieces (None: all). After all requests, raises the first error."""
        assembly, held = holding.assembly, holding.artifact.held
        assert assembly.manifest is not None
        missing = (p for p in (range(assembly.pieces) if wanted is None else sorted(wanted)) if p not in held)
        left = iter(spans(missing, assembly.open.piece, assembly.manifest.log, SPAN_BYTES))
        results = await asyncio.gather(
            *(self._fetch_spans(holding, left) for _ in range(AT_ONCE)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _fetch_spans(self, holding: Holding, left: Iterator[PieceSpan]) -> None:
        """Fetch one span after the other; several such tasks share the spans."""
        for span in left:
            while self.node.paused:
                await self._news.wait(CHECK_S / 10)
            name = slice_name(holding.id, span.number)
            with self.catalog.blaming(name):
                async with self.room:
                    payload = await self.objects.get_range(name, span.start, span.size)
                if holding.aborted or holding.source is not self:
                    return
                self._take(holding, span, payload)

    def _take(self, holding: Holding, span: PieceSpan, payload: memoryview) -> None:
        """Add the pieces of a span. If one does not match, add the others and raise IntegrityError."""
        node, size, wrong = self.node, holding.open.piece, None
        self.bytes_received += len(payload)
        for index in range(span.first, span.stop):
            at = (index - span.first) * size
            piece = payload[at : at + size]
            offer = holding.artifact.offer(index, piece)
            if offer is PieceOffer.NEW:
                node.add_piece(holding, index, piece)
            elif offer is PieceOffer.CORRUPT:
                node.count_corrupt(None)
                wrong = index
        node.forward()
        if wrong is not None:
            raise IntegrityError(f"mirror: piece {wrong} of {holding.open.version} does not match its hash")
