"""Keeps a copy of the run in an object store (docs/mirror.md): uploads what the store there lacks, markers last, removes what retention lets go, and writes
again what is not there as it should be.

Promises: publishing and peers never wait for it, whatever becomes of the store there; in memory are at most AT_ONCE slices; what was uploaded once is not
uploaded again after a crash; a piece that does not match its hash never leaves; nobody's word makes it write anything but what it has. Slices go up, and are looked
at, in the gaps of live traffic, and are given up when it begins (but one goes up every STARVED_S), or at a stated rate.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric

from p2pcast import metrics
from p2pcast.bell import Bell
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from p2pcast.events import Events
from p2pcast.http import Document
from p2pcast.mirror.doubts import Doubt, Doubts, artifact_of
from p2pcast.mirror.names import KEY, SLICE_BYTES, Marker, slice_name, tail_name
from p2pcast.mirror.objects import MissingError, Objects, TooLargeError
from p2pcast.mirror.plan import Inventory, head, removals, uploads
from p2pcast.relay.catchup import Edge
from p2pcast.store.retention import DEFAULT, Counts
from p2pcast.store.store import Store, Stored
from p2pcast.version import Version
from trainer_node.mirror_contents import Contents

logger = logging.getLogger("p2pcast.mirror")

AT_ONCE = 4
"""Slices that are being uploaded at one time while nobody else wants the uplink."""
STARVED_S = 30.0
"""A slice goes up after this even if the gap that it waits for never comes."""
LOOK_S = 0.05
RETRY_MIN_S = 0.5
RETRY_MAX_S = 60.0
RESCAN_S = 1800.0
"""What the store there holds is listed anew this often: somebody may have removed or changed something."""
LOOK_AGAIN_S = 10.0
"""After an object could not be read back."""
REMOVE_AT_ONCE = 64


class MirroringOwner(Protocol):
    store: Store
    events: Events

    def sending(self) -> bool:
        """Whether live traffic wants the uplink."""
        ...


class Mirroring:
    """``news`` rings whenever the store has changed."""

    def __init__(self, owner: MirroringOwner, objects: Objects, rate_bps: float | None, counts: Counts = DEFAULT) -> None:
        self.news = Bell()
        self.error: str | None = None
        self.errors = 0
        self.bytes_uploaded = 0
        self.mended = 0
        """Objects that were not as they should be, and were written again."""
        self._owner = owner
        self._objects = objects
        self._rate_bps = rate_bps
        self._counts = counts
        self._contents = Contents(owner.store)
        self._mirror = Inventory()
        self._doubts = Doubts()
        self._scanned_at: float | None = None
        self._look_at = 0.0
        """When, by the loop's clock, what is doubted may be looked at."""
        self._damaged: set[bytes] = set()
        self._said: str | None = None
        self._at_once = 1
        self._fed_at = 0.0
        """When, by the loop's clock, slices last began to go up."""
        self._free_at = 0.0
        """When, by the loop's clock, a stated rate allows the next slice."""

    # -- how it stands

    def status(self) -> Document:
        """As in /status."""
        here, mirror = self._here(), self._mirror
        newest = None if self._scanned_at is None else head(here, mirror)
        lacking = uploads(here, mirror, self._counts)
        return {
            "url": self._objects.url,
            "version": None if newest is None else str(newest),
            "lag_versions": self._lag(newest),
            "current": self._current(here),
            "artifacts": len(mirror.ready(here)),
            "pending_bytes": sum(mirror.missing_bytes(e) for e in lacking),
            "uploaded_bytes": self.bytes_uploaded,
            "damaged": len(self._damaged),
            "mended": self.mended,
            "errors": self.errors,
            "error": self.error,
        }

    def _current(self, here: Mapping[bytes, Edge]) -> bool:
        """What is kept here is there, nothing else is, and all of it is believed."""
        waits = (
            uploads(here, self._mirror, self._counts)
            or removals(here, self._mirror, self._counts)
            or self._doubt(here) is not None
        )
        return self._scanned_at is not None and not waits

    def _lag(self, newest: Version | None) -> int:
        return metrics.lag(newest, sorted({s.version for s in self._owner.store.artifacts.values()}))

    def families(self) -> Iterable[Metric]:
        status = self.status()
        yield metrics.gauge(
            "p2pcast_hub_mirror_lag_versions", "Versions that the mirror does not lead to yet", status["lag_versions"]
        )
        yield metrics.gauge("p2pcast_hub_mirror_artifacts", "Artifacts that are ready on the mirror", status["artifacts"])
        yield metrics.gauge("p2pcast_hub_mirror_pending_bytes", "Bytes that the mirror lacks", status["pending_bytes"])
        yield metrics.counter("p2pcast_hub_mirror_uploaded_bytes", "Bytes uploaded to the mirror", self.bytes_uploaded)
        yield metrics.counter(
            "p2pcast_hub_mirror_mended", "Objects of the mirror that were wrong, and were written again", self.mended
        )
        yield metrics.counter("p2pcast_hub_mirror_errors", "Requests to the mirror that failed", self.errors)

    def complain(self, names: Iterable[str]) -> None:
        """A follower says that these objects are wrong, or not there."""
        self._doubts.complain(names)
        self.news.ring()

    # -- work

    async def run(self) -> None:
        """Until cancelled; nothing that goes wrong ends it."""
        failures = 0
        self._fed_at = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    await self._step()
                    failures = 0
                    self._recovered()
                except P2PCastError as error:
                    failures += 1
                    self._failed(error)
                    await asyncio.sleep(min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.5))
        finally:
            self._contents.close()

    async def _step(self) -> None:
        """Look what is to be done, and do a little of the first. Raises P2PCastError."""
        now = asyncio.get_running_loop().time()
        if self._scanned_at is None or now - self._scanned_at > RESCAN_S:
            listing = await self._objects.list()
            self._mirror = Inventory.of(listing)
            self._doubts.listed(listing)
            self._scanned_at = now
        here = self._here()
        if lacking := uploads(here, self._mirror, self._counts):
            await self._upload(lacking[0])
        elif names := removals(here, self._mirror, self._counts)[:REMOVE_AT_ONCE]:
            await self._objects.remove(names)
            self._mirror.gone(names)
            self._doubts.gone(names)
        elif now >= self._look_at and (doubt := self._doubt(here)) is not None:
            await self._gap()
            await self._round([self._look_into(doubt)])
        else:
            until = self._look_at if self._doubt(here) is not None else self._scanned_at + RESCAN_S
            await self.news.wait(until - now)

    def _doubt(self, here: Mapping[bytes, Edge]) -> Doubt | None:
        return self._doubts.next({a: here[a] for a in self._mirror.ready(here) if a in here})

    def _here(self) -> Mapping[bytes, Edge]:
        every = self._owner.store.artifacts.values()
        return {s.id: Edge(s.id, s.base, s.version, s.manifest.log) for s in every if s.id not in self._damaged}

    async def _upload(self, edge: Edge) -> None:
        """A few slices of it, or what completes it."""
        stored = self._owner.store.artifacts.get(edge.artifact)
        if stored is None:
            return  # retention was faster
        if missing := self._mirror.missing(edge):
            await self._gap()
            await self._round([self._upload_slice(stored, number) for number in missing[: self._at_once]])
        else:
            await self._complete(stored)

    async def _gap(self) -> None:
        """Returns when slices may go up."""
        loop = asyncio.get_running_loop()
        if self._rate_bps is not None:
            self._at_once = 1
            await asyncio.sleep(self._free_at - loop.time())
            self._free_at = max(self._free_at, loop.time()) + 8 * SLICE_BYTES / self._rate_bps
        while self._give_way():
            await self.news.wait(LOOK_S)

    def _give_way(self) -> bool:
        """Live traffic comes first, but a slice goes up every STARVED_S."""
        if self._rate_bps is not None or not self._owner.sending():
            return False
        return asyncio.get_running_loop().time() - self._fed_at < STARVED_S

    async def _round(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Side by side, for as long as nobody else wants the uplink: then what is under way is given up. The first error, once all have ended."""
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(part, name="upload to the mirror") for part in work]
        starved, pending = self._owner.sending(), set(tasks)
        self._fed_at = loop.time()
        try:
            while pending:
                _, pending = await asyncio.wait(pending, timeout=LOOK_S)
                if pending and not starved and self._give_way():
                    break
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
        # In a short gap few slices get further than many, of which none is whole.
        self._at_once = 1 if pending or starved else min(AT_ONCE, 2 * self._at_once)
        errors = [task.exception() for task in tasks if not task.cancelled()]
        for error in errors:
            if error is not None:
                raise error

    async def _upload_slice(self, stored: Stored, number: int) -> None:
        try:
            data = await self._contents.slice(stored, number)
        except (IntegrityError, LocalError) as error:
            self._found_damaged(stored.id, error)
            return
        await self._put(slice_name(stored.id, number), data)
        self._mirror.wrote_slice(stored.id, number, len(data))

    async def _complete(self, stored: Stored) -> None:
        """All slices are there: what explains them, and the marker last of all."""
        if not self._mirror.keyed:
            await self._put(KEY, self._owner.store.run_key)
            self._mirror.keyed = True
        if stored.id not in self._mirror.tails:
            await self._put(tail_name(stored.id), self._contents.tail(stored))
            self._mirror.wrote_tail(stored.id)
        marker = Marker(stored.version, stored.base, stored.id)
        await self._put(str(marker), self._contents.marker(stored))
        self._mirror.wrote_marker(marker)
        self._owner.events.emit(
            "mirrored", version=str(stored.version), base=stored.base and str(stored.base), bytes=stored.manifest.log
        )
        logger.info("version %s (%s) is on the mirror", stored.version, stored.kind)

    async def _put(self, name: str, data: bytes) -> None:
        self._doubts.wrote(name, await self._objects.put(name, data))
        self.bytes_uploaded += len(data)

    # -- what is there already

    async def _look_into(self, doubt: Doubt) -> None:
        """One object: what it holds is right, or is replaced by what is."""
        try:
            data = await self._contents.of(doubt.name)
        except (IntegrityError, LocalError) as error:
            self._found_damaged(artifact_of(doubt.name) or b"", error)
            return
        if data is None:
            self._doubts.gone([doubt.name])
            return
        try:
            right = await self._holds(doubt, data)
        except RetryableError as error:
            # No reason to keep uploads waiting.
            self._look_at = asyncio.get_running_loop().time() + LOOK_AGAIN_S
            self._failed(error)
            return
        if right:
            self._doubts.right(doubt)
        else:
            await self._put(doubt.name, data)
            self.mended += 1
            self._owner.events.emit("mirror_mended", name=doubt.name)
            logger.warning("mirror: %s was not as it should be, and was written again", doubt.name)

    async def _holds(self, doubt: Doubt, data: bytes) -> bool:
        if doubt.found is not None and doubt.found.size != len(data):
            return False
        # Most stores call what came in one request by its MD5; then it need not be read. Where it is something else, that is no proof of anything.
        if (
            doubt.found is not None
            and not doubt.asked
            and doubt.found.tag == hashlib.md5(data, usedforsecurity=False).hexdigest()
        ):
            return True
        try:
            return await self._objects.get(doubt.name, len(data)) == data
        except (MissingError, TooLargeError):
            return False

    def _found_damaged(self, artifact: bytes, error: P2PCastError) -> None:
        """It is offered no more, unless it went meanwhile."""
        if (stored := self._owner.store.artifacts.get(artifact)) is not None:
            self._damaged.add(artifact)
            logger.error("version %s does not go to the mirror: %s", stored.version, error)

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
