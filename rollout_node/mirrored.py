"""A peer's way through an object store: which versions a run's mirror holds, and their pieces, when the swarm is out of reach (docs/mirror.md).

Promises: nothing is believed of a store there that the run's key has not signed, and the key is the one that the token names; a piece is checked like one from a
peer, before it is written or passed on; a store that shows an older state than this peer has been at never takes it back; a request that fails costs that request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import Metric

from p2pcast import limits, metrics
from p2pcast.artifact.p2pd import Tail
from p2pcast.artifact.records import KEY_BYTES, run_id
from p2pcast.bell import Bell
from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, P2PCastError, RefusedError, RetryableError
from p2pcast.events import Events
from p2pcast.http import Document
from p2pcast.mirror.names import KEY, slice_name
from p2pcast.mirror.objects import MissingError, Objects
from p2pcast.mirror.plan import Span, spans
from p2pcast.relay.artifact import Offer
from p2pcast.relay.catchup import Edge
from p2pcast.relay.excerpt import Excerpt
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from rollout_node.catalog import Entry
from rollout_node.mirror_catalog import MirrorCatalog

logger = logging.getLogger("p2pcast.mirror")

AT_ONCE = 8
"""Requests under way."""
SPAN_BYTES = 2 * limits.MIB
"""In one request: with `AT_ONCE` of them, what is in memory on its way to the disk."""
AHEAD = 4
"""Artifacts of the way that are fetched side by side."""
POLL_MIN_S = 1.0
POLL_MAX_S = 10.0
"""Between looks for new versions: longer each time that there is none."""
RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0
GONE_S = 3.0
"""The hub has been out of reach for so long, before the mirror is turned to."""
BATCHES_AT_ONCE = 64
"""Signatures verified before others on the loop have their turn."""
PATIENCE_S = 5.0
"""So long has a parent that is still there for what the mirror shows, before it is fetched from there."""
LOOK_S = 0.25
KEY_TRIES = 5
SPOILT = 5
"""Pieces that did not match, before an artifact is left alone for `SPOILT_S`."""
SPOILT_S = 60.0


class MirroredOwner(Protocol):
    node: Node
    events: Events

    def swarm_lost(self) -> bool:
        """The hub is out of reach."""
        ...

    def fed(self) -> bool:
        """A parent is there."""
        ...

    def way(self) -> list[Edge]:
        """What leads from here to the newest version."""
        ...

    def mirror_listed(self) -> None:
        """What the mirror shows is known, and may have changed."""
        ...

    def look_for_a_way(self) -> None: ...


class Mirrored:
    """``run`` until cancelled. ``key`` comes first where no hub has told the run's: then the mirror is turned to at once."""

    def __init__(self, owner: MirroredOwner, objects: Objects, run: bytes) -> None:
        self.in_use = False
        self.error: str | None = None
        self.errors = 0
        self.bytes_received = 0
        self._owner = owner
        self._objects = objects
        self._run = run
        self._room = asyncio.Semaphore(AT_ONCE)
        self._catalog = MirrorCatalog(objects, run, self._room)
        self._news = Bell()
        self._spoilt: Counter[bytes] = Counter()
        self._shunned: dict[bytes, float] = {}
        """Artifact → until when it is left alone."""
        self._said: str | None = None
        self._at_once = False

    # -- p2pcast.relay.node.Sender

    live = False

    def pushes(self, artifact: bytes) -> bool:
        return True

    # -- for the peer

    @property
    def entries(self) -> dict[bytes, Entry]:
        """Artifacts that are whole on the mirror, as the run's key has signed."""
        return self._catalog.entries

    def complaints(self) -> list[str]:
        """Names of objects there that were wrong or missing, since this was last asked."""
        return self._catalog.complaints()

    async def key(self) -> bytes:
        """The run's public key, as the mirror has it. Raises RefusedError (it is another run's), RetryableError."""
        key = await self._read_key()
        if len(key) != KEY_BYTES or run_id(key) != self._run:
            raise RefusedError(f"{self._objects.url}: its key is not the one that the token names")
        self._at_once = True
        return key

    def hasten(self) -> None:
        """The hub is known to be out of reach: it is not waited for."""
        self._at_once = True

    async def _read_key(self) -> bytes:
        wait_s = RETRY_MIN_S
        for _ in range(KEY_TRIES - 1):
            try:
                return await self._objects.get(KEY, KEY_BYTES)
            except MissingError:
                raise RetryableError(f"{self._objects.url} holds nothing of this run yet") from None
            except RetryableError as error:
                self._failed(error)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
            wait_s *= 2
        return await self._objects.get(KEY, KEY_BYTES)

    def edges(self) -> dict[bytes, Edge]:
        now = asyncio.get_running_loop().time()
        return {a: Edge(a, e.base, e.version, e.size) for a, e in self.entries.items() if self._shunned.get(a, 0.0) <= now}

    def status(self) -> Document:
        newest = max((e.version for e in self.entries.values()), default=None)
        return {
            "url": self._objects.url,
            "in_use": self.in_use,
            "version": None if newest is None else str(newest),
            "artifacts": len(self.entries),
            "bytes_received": self.bytes_received,
            "errors": self.errors,
            "error": self.error,
        }

    def families(self) -> Iterable[Metric]:
        yield metrics.gauge("p2pcast_peer_mirror_in_use", "Whether versions come from the mirror", float(self.in_use))
        yield metrics.gauge("p2pcast_peer_mirror_artifacts", "Artifacts that the mirror shows", len(self.entries))
        yield metrics.counter("p2pcast_peer_mirror_received_bytes", "Bytes received from the mirror", self.bytes_received)
        yield metrics.counter(
            "p2pcast_peer_mirror_errors", "Requests to the mirror that failed, and pieces that did not match", self.errors
        )

    def look(self) -> None:
        """The way may have changed."""
        self._news.ring()

    async def run(self) -> None:
        """Until cancelled: follows the mirror for as long as the swarm is lost."""
        while True:
            await self._until(lost=True)
            self._use(True)
            work = asyncio.create_task(self._follow(), name="mirror")
            try:
                await self._until(lost=False, work=work)
            finally:
                work.cancel()
                await asyncio.wait([work])
            if not work.cancelled():
                work.result()
            self._use(False)

    async def _until(self, *, lost: bool, work: asyncio.Task[None] | None = None) -> None:
        """The swarm has been lost for a while, or is back."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while work is None or not work.done():
            if self._owner.swarm_lost() != lost:
                since = loop.time()
            elif not lost or self._at_once or loop.time() - since >= GONE_S:
                self._at_once = False
                return
            await self._news.wait(LOOK_S)

    def _use(self, use: bool) -> None:
        self.in_use = use
        self._owner.events.emit("mirror_used" if use else "mirror_left")
        logger.info("following %s" if use else "the swarm is back; %s is left", self._objects.url)
        self._owner.look_for_a_way()

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll(), name="mirror's versions")
            group.create_task(self._fetch(), name="mirror's pieces")

    # -- what there is

    async def _poll(self) -> None:
        wait_s = POLL_MIN_S
        while True:
            try:
                news = await self._list()
            except P2PCastError as error:
                self._failed(error)
                news = False
            else:
                self._recovered()
            wait_s = POLL_MIN_S if news else min(POLL_MAX_S, wait_s * 1.5)
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))

    async def _list(self) -> bool:
        """True when there is something new."""
        news, error = await self._catalog.look(self._owner.node.run_key)
        self._owner.mirror_listed()
        self._news.ring()
        if error is not None:
            raise error
        return news

    # -- its pieces

    async def _fetch(self) -> None:
        tasks: dict[bytes, asyncio.Task[None]] = {}
        try:
            while True:
                for artifact in [a for a, t in tasks.items() if t.done()]:
                    tasks.pop(artifact).result()
                for edge in self._owner.way()[:AHEAD]:
                    if len(tasks) < AHEAD and edge.artifact not in tasks and self._due(edge.artifact):
                        tasks[edge.artifact] = asyncio.create_task(self._artifact(edge.artifact), name=f"mirror {edge.version}")
                        tasks[edge.artifact].add_done_callback(lambda _: self._news.ring())
                await self._news.wait(LOOK_S if tasks else POLL_MIN_S)
        finally:
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values())

    def _due(self, artifact: bytes) -> bool:
        """It is there, nobody sends it, and nobody is about to."""
        now = asyncio.get_running_loop().time()
        if artifact not in self.entries or self._shunned.get(artifact, 0.0) > now:
            return False
        if artifact in self._owner.node.pulled:
            return False
        holding = self._owner.node.holdings.get(artifact)
        if holding is not None and (holding.completed_at is not None or holding.source is not None):
            return False
        if artifact in self._owner.node.pulled:
            return False
        return not self._owner.fed() or now - self._catalog.seen_at[artifact] > PATIENCE_S

    async def _artifact(self, artifact: bytes) -> None:
        """Until it is complete, has another source, or the mirror has it no more."""
        failures, holding = 0, None
        try:
            while artifact in self.entries and (holding is None or not (holding.aborted or holding.completed_at)):
                try:
                    holding = holding or await self._open(artifact)
                    if holding is None:
                        return
                    await self._pieces(holding)
                    self._recovered()
                except P2PCastError as error:
                    self._failed(error)
                    failures += 1
                    if isinstance(error, IntegrityError) and self._shun(artifact):
                        return
                    await asyncio.sleep(min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.5))
        finally:
            if holding is not None and holding.source is self:
                holding.source = None

    def _shun(self, artifact: bytes) -> bool:
        """True when it has been spoilt too often: then another way is looked for."""
        self._spoilt[artifact] += 1
        if self._spoilt[artifact] < SPOILT:
            return False
        self._spoilt[artifact] = 0
        self._shunned[artifact] = asyncio.get_running_loop().time() + SPOILT_S
        self._owner.look_for_a_way()
        return True

    async def _open(self, artifact: bytes) -> Holding | None:
        """Its directory, verified, in the node; None where it has found another source meanwhile."""
        node = self._owner.node

        async def verify(tail: Tail, layout: Layout) -> None:
            assembly = await asyncio.get_running_loop().run_in_executor(node.disk, tail.assembly, layout)
            if not assembly.confirmed:
                raise IntegrityError(
                    f"mirror: the tail of {assembly.open.version} has no durable record: the hub never stored this version"
                )

        tail, layout = await self._catalog.directory(artifact, node.run_key, node.layouts, verify)
        known = node.holdings.get(artifact)
        if known is not None and (known.source is not None or known.completed_at is not None):
            return None
        node.add_layout(layout)
        holding = node.open(tail.open, self)
        holding.source, holding.idle = self, False
        for number, signed in enumerate(tail.batches):
            node.add_batch(holding, signed)
            if not number % BATCHES_AT_ONCE:
                await asyncio.sleep(0)
        node.seal(holding, tail.manifest)
        if tail.durable:
            node.confirm(holding, tail.durable)
        return holding

    async def fetch_part(self, artifact: bytes, excerpt: Excerpt) -> None:
        """That of it, into a holding that the caller has announced as an excerpt. Raises P2PCastError where it could not be had."""
        holding = await self._open(artifact)
        if holding is None:
            raise RetryableError("it comes another way by now")
        try:
            wanted = excerpt.pieces(holding.assembly)
            await self._pieces(holding, wanted)
            while not all(piece in holding.stored for piece in wanted):
                holding.progress.clear()
                await holding.progress.wait()
        finally:
            holding.source = None

    async def _pieces(self, holding: Holding, wanted: Collection[int] | None = None) -> None:
        """All that are missing, of those that are wanted (None: all). The first error, once every request has ended."""
        assembly, held = holding.assembly, holding.artifact.held
        assert assembly.manifest is not None
        missing = (p for p in (range(assembly.pieces) if wanted is None else sorted(wanted)) if p not in held)
        left = iter(spans(missing, assembly.open.piece, assembly.manifest.log, SPAN_BYTES))
        results = await asyncio.gather(*(self._some(holding, left) for _ in range(AT_ONCE)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _some(self, holding: Holding, left: Iterator[Span]) -> None:
        """One span after the other; they are shared out among several of these."""
        for span in left:
            while self._owner.node.paused:
                await self._news.wait(LOOK_S / 10)
            name = slice_name(holding.id, span.number)
            with self._catalog.blaming(name):
                async with self._room:
                    payload = await self._objects.get_range(name, span.start, span.size)
                if holding.aborted or holding.source is not self:
                    return
                self._take(holding, span, payload)

    def _take(self, holding: Holding, span: Span, payload: memoryview) -> None:
        """Raises IntegrityError where a piece does not match; the others have been taken."""
        node, size, wrong = self._owner.node, holding.open.piece, None
        self.bytes_received += len(payload)
        for index in range(span.first, span.stop):
            at = (index - span.first) * size
            piece = payload[at : at + size]
            offer = holding.artifact.offer(index, piece)
            if offer is Offer.NEW:
                node.add_piece(holding, index, piece)
            elif offer is Offer.CORRUPT:
                node.pieces_corrupt += 1
                wrong = index
        node.forward()
        if wrong is not None:
            raise IntegrityError(f"mirror: piece {wrong} of {holding.open.version} does not match its hash")

    # -- failures

    def _failed(self, error: P2PCastError) -> None:
        self.errors += 1
        self.error = str(error)
        if self._said != self.error:
            self._said = self.error
            self._owner.events.emit("mirror_failed", why=self.error)
            logger.warning("%s", error)

    def _recovered(self) -> None:
        self.error = self._said = None
