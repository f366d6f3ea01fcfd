"""Keeps a copy of the run in an object store (docs/guides/mirror.md): uploads missing objects, markers last, removes
artifacts that retention has removed, and rewrites wrong objects.

Guarantees: publishing and peers never wait for the mirror, whatever its state. At most AT_ONCE slices are in memory.
After a crash, no object is uploaded again. A piece that does not match its hash is never sent. A peer's report never
makes the hub write anything but its own contents. Slices are uploaded and checked while there is no live traffic, or at
a configured rate. Uploads are cancelled when traffic begins, but one slice is uploaded every STARVED_S.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from p2pcast.daemon.http_server import Document
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror.object_names import KEY, SLICE_BYTES, ReadyMarker, slice_name, tail_name
from p2pcast.mirror.object_store import ObjectMissingError, Objects, TooLargeError
from p2pcast.mirror.suspect_objects import SuspectObject, SuspectObjects, artifact_of
from p2pcast.mirror.upload_plan import Inventory, head, removals, uploads
from p2pcast.process.events import Events
from p2pcast.process.metric_kinds import lag
from p2pcast.relay.artifact_path import Edge
from p2pcast.store.artifact_store import ArtifactStore, Stored
from p2pcast.store.retention import DEFAULT, RetentionCounts
from trainer_node import hub_metrics
from trainer_node.background.mirror_contents import MirrorContents

logger = logging.getLogger("p2pcast.mirror")

AT_ONCE = 4
"""Slices to upload at the same time while live traffic does not need the uplink."""
STARVED_S = 30.0
"""A slice is uploaded after this many seconds even during live traffic."""
CHECK_S = 0.05
"""Interval between two checks for live traffic, in seconds."""
RETRY_MIN_S = 0.5
RETRY_MAX_S = 60.0
RESCAN_S = 1800.0
"""Interval between two listings of the mirror, in seconds, because other programs may have changed it."""
RECHECK_S = 10.0
"""How long to wait after an object could not be read back, in seconds."""
REMOVE_AT_ONCE = 64


class MirrorUploader:
    """Uploads until ``run`` is cancelled."""

    def __init__(
        self,
        store: ArtifactStore,
        objects: Objects,
        events: Events,
        live_traffic: Callable[[], bool],
        store_changed: Wakeup,
        *,
        rate_bps: float | None = None,
        counts: RetentionCounts = DEFAULT,
    ) -> None:
        """``live_traffic``: whether peers need the uplink now. ``store_changed`` is notified whenever the store has
        changed. ``rate_bps``: upload rate in bit/s, or None to use what live traffic leaves.
        """
        self.error: str | None = None
        self.errors = 0
        self.bytes_uploaded = 0
        self.repaired = 0
        """Number of wrong objects that were rewritten."""
        self._store = store
        self._objects = objects
        self._events = events
        self._live_traffic = live_traffic
        self._wakeup = store_changed
        self._rate_bps = rate_bps
        self._counts = counts
        self._contents = MirrorContents(store)
        self._mirror = Inventory()
        self._suspects = SuspectObjects()
        self._scanned_at: float | None = None
        self._check_at = 0.0
        """Earliest time for the next check of a suspect object, by the loop's clock."""
        self._damaged: set[bytes] = set()
        self._logged: str | None = None
        self._at_once = 1
        self._slice_at = 0.0
        """When slices last began to be uploaded, by the loop's clock."""
        self._free_at = 0.0
        """When a configured rate allows the next slice, by the loop's clock."""

    # -- status

    def status(self) -> Document:
        """The mirror's state for /status."""
        here, mirror = self._stored_edges(), self._mirror
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
            "mended": self.repaired,
            "errors": self.errors,
            "error": self.error,
        }

    def _current(self, here: Mapping[bytes, Edge]) -> bool:
        """Whether the mirror has exactly what the store keeps, and no object is suspect."""
        waits = (
            uploads(here, self._mirror, self._counts)
            or removals(here, self._mirror, self._counts)
            or self._next_suspect(here) is not None
        )
        return self._scanned_at is not None and not waits

    def _lag(self, newest: Version | None) -> int:
        return lag(newest, sorted(self._store.versions()))

    def families(self) -> Iterable[Metric]:
        status = self.status()
        yield hub_metrics.MIRROR_LAG(status["lag_versions"])
        yield hub_metrics.MIRROR_ARTIFACTS(status["artifacts"])
        yield hub_metrics.MIRROR_PENDING(status["pending_bytes"])
        yield hub_metrics.MIRROR_UPLOADED(self.bytes_uploaded)
        yield hub_metrics.MIRROR_REPAIRED(self.repaired)
        yield hub_metrics.MIRROR_ERRORS(self.errors)

    def report_wrong(self, names: Iterable[str]) -> None:
        """Handle a peer's report that these objects are wrong or missing."""
        self._suspects.complain(names)
        self._wakeup.notify()

    # -- work

    async def run(self) -> None:
        """Keep the mirror current until cancelled. No failure stops this."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, uniform)
        self._slice_at = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    await self._step()
                    backoff.reset()
                    self._recovered()
                except P2PCastError as error:
                    self._failed(error)
                    await asyncio.sleep(backoff.next_s())
        finally:
            self._contents.close()

    async def _step(self) -> None:
        """Find out what needs to be done, and do a small part of the most urgent. Raises P2PCastError."""
        now = asyncio.get_running_loop().time()
        if self._scanned_at is None or now - self._scanned_at > RESCAN_S:
            listing = await self._objects.list()
            self._mirror = Inventory.of(listing)
            self._suspects.listed(listing)
            self._scanned_at = now
        here = self._stored_edges()
        if lacking := uploads(here, self._mirror, self._counts):
            await self._upload(lacking[0])
        elif names := removals(here, self._mirror, self._counts)[:REMOVE_AT_ONCE]:
            await self._objects.remove(names)
            self._mirror.gone(names)
            self._suspects.gone(names)
        elif now >= self._check_at and (suspect := self._next_suspect(here)) is not None:
            await self._until_gap()
            await self._round([self._check_object(suspect)])
        else:
            until = self._check_at if self._next_suspect(here) is not None else self._scanned_at + RESCAN_S
            await self._wakeup.wait(until - now)

    def _next_suspect(self, here: Mapping[bytes, Edge]) -> SuspectObject | None:
        return self._suspects.next({a: here[a] for a in self._mirror.ready(here) if a in here})

    def _stored_edges(self) -> Mapping[bytes, Edge]:
        every = self._store.artifacts.values()
        return {s.id: Edge(s.id, s.base, s.version, s.manifest.log) for s in every if s.id not in self._damaged}

    async def _upload(self, edge: Edge) -> None:
        """Upload a few slices of an artifact, or the objects that complete it."""
        stored = self._store.artifacts.get(edge.artifact)
        if stored is None:
            return  # retention has removed it meanwhile
        if missing := self._mirror.missing(edge):
            await self._until_gap()
            await self._round([self._upload_slice(stored, number) for number in missing[: self._at_once]])
        else:
            await self._complete(stored)

    async def _until_gap(self) -> None:
        """Wait until slices may be uploaded."""
        loop = asyncio.get_running_loop()
        if self._rate_bps is not None:
            self._at_once = 1
            await asyncio.sleep(self._free_at - loop.time())
            self._free_at = max(self._free_at, loop.time()) + 8 * SLICE_BYTES / self._rate_bps
        while self._must_wait():
            await self._wakeup.wait(CHECK_S)

    def _must_wait(self) -> bool:
        """Whether live traffic has priority now; it does unless no slice was uploaded for STARVED_S."""
        if self._rate_bps is not None or not self._live_traffic():
            return False
        return asyncio.get_running_loop().time() - self._slice_at < STARVED_S

    async def _round(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` concurrently until live traffic needs the uplink; unfinished parts are then cancelled. Raises
        the first error once all parts have finished.
        """
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(part, name="upload to the mirror") for part in work]
        starved, pending = self._live_traffic(), set(tasks)
        self._slice_at = loop.time()
        try:
            while pending:
                _, pending = await asyncio.wait(pending, timeout=CHECK_S)
                if pending and not starved and self._must_wait():
                    break
        finally:
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending)
        # In a short gap, a few slices finish sooner than many at once.
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
        """Complete an artifact whose slices are all on the mirror: upload the tail, then the marker."""
        if not self._mirror.keyed:
            await self._put(KEY, self._store.run_key)
            self._mirror.keyed = True
        if stored.id not in self._mirror.tails:
            await self._put(tail_name(stored.id), self._contents.tail(stored))
            self._mirror.wrote_tail(stored.id)
        marker = ReadyMarker(stored.version, stored.base, stored.id)
        await self._put(str(marker), self._contents.marker(stored))
        self._mirror.wrote_marker(marker)
        self._events.emit(
            "mirrored", version=str(stored.version), base=stored.base and str(stored.base), bytes=stored.manifest.log
        )
        logger.info("version %s (%s) is on the mirror", stored.version, stored.kind)

    async def _put(self, name: str, data: bytes) -> None:
        self._suspects.wrote(name, await self._objects.put(name, data))
        self.bytes_uploaded += len(data)

    # -- objects that are on the mirror

    async def _check_object(self, suspect: SuspectObject) -> None:
        """Check one object: confirm its contents, or rewrite them."""
        try:
            data = await self._contents.of(suspect.name)
        except (IntegrityError, LocalError) as error:
            self._found_damaged(artifact_of(suspect.name) or b"", error)
            return
        if data is None:
            self._suspects.gone([suspect.name])
            return
        try:
            right = await self._holds(suspect, data)
        except RetryableError as error:
            # Uploads continue meanwhile.
            self._check_at = asyncio.get_running_loop().time() + RECHECK_S
            self._failed(error)
            return
        if right:
            self._suspects.right(suspect)
        else:
            await self._put(suspect.name, data)
            self.repaired += 1
            self._events.emit("mirror_mended", name=suspect.name)
            logger.warning("mirror: the object %s was wrong, and was written again", suspect.name)

    async def _holds(self, suspect: SuspectObject, data: bytes) -> bool:
        if suspect.found is not None and suspect.found.size != len(data):
            return False
        # Most stores use the MD5 hash as the tag of an object that came in one request, so that the object need not be
        # read. A different tag proves nothing.
        if (
            suspect.found is not None
            and not suspect.asked
            and suspect.found.tag == hashlib.md5(data, usedforsecurity=False).hexdigest()
        ):
            return True
        try:
            return await self._objects.get(suspect.name, len(data)) == data
        except (ObjectMissingError, TooLargeError):
            return False

    def _found_damaged(self, artifact: bytes, error: P2PCastError) -> None:
        """Stop uploading the artifact, unless retention has removed it meanwhile."""
        if (stored := self._store.artifacts.get(artifact)) is not None:
            self._damaged.add(artifact)
            logger.error("version %s does not go to the mirror: %s", stored.version, error)

    # -- failures

    def _failed(self, error: P2PCastError) -> None:
        self.errors += 1
        self.error = str(error)
        if self._logged != self.error:
            self._logged = self.error
            self._events.emit("mirror_failed", why=self.error)
            logger.warning("%s", error)

    def _recovered(self) -> None:
        self.error = self._logged = None
