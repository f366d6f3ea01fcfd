"""The artifacts that are complete on a run's mirror, and the directory of each (docs/guides/mirror.md).

Guarantees:

- Every entry is signed with the run's key and matches its marker's name.
- A directory belongs to its entry.
- Wrong or missing objects are reported to the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.signed_records import Manifest
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, P2PCastError
from p2pcast.mirror.object_names import READY, ReadyMarker, most_tail_bytes, tail_name
from p2pcast.mirror.object_store import ObjectMissingError, Objects, ShortError
from p2pcast.relay.artifact_path import Edge
from rollout_node.control.artifact_catalog import Entry

Verify = Callable[[Tail, Layout], Awaitable[object]]
"""Verifies every signature in a tail, off the loop. Raises IntegrityError."""


class NoMirror:
    """The empty catalog of a peer without a mirror."""

    in_use = False
    entries: Mapping[bytes, Entry] = {}

    def edges(self) -> dict[bytes, Edge]:
        return {}

    def take_complaints(self) -> list[str]:
        return []


class MirrorCatalog:
    """``room`` limits the concurrent requests, including those for pieces."""

    def __init__(self, objects: Objects, run: bytes, room: asyncio.Semaphore) -> None:
        self.in_use = False
        """Whether versions currently come from the mirror."""
        self.entries: dict[bytes, Entry] = {}
        """Artifacts that are complete on the mirror."""
        self.seen_at: dict[bytes, float] = {}
        """Artifact → when it was first listed, by the loop's clock."""
        self._objects = objects
        self._run = run
        self._room = room
        self._avoided: dict[bytes, float] = {}
        """Artifact → until when it must not be fetched, by the loop's clock."""
        self._manifests: dict[bytes, bytes] = {}
        self._wrong: dict[str, None] = {}
        """Names of wrong or missing objects, for the next report."""

    def edges(self) -> dict[bytes, Edge]:
        """The mirror's artifacts as edges from version to version, except those being avoided."""
        now = asyncio.get_running_loop().time()
        return {a: Edge(a, e.base, e.version, e.size) for a, e in self.entries.items() if not self.is_avoided(a, now)}

    def avoid(self, artifact: bytes, until: float) -> None:
        self._avoided[artifact] = until

    def is_avoided(self, artifact: bytes, now: float) -> bool:
        return self._avoided.get(artifact, 0.0) > now

    async def refresh(self, run_key: bytes) -> tuple[bool, P2PCastError | None]:
        """List the mirror. Returns whether it has new artifacts, and the error if a marker could not be read. Raises
        RetryableError if the mirror cannot be listed.
        """
        listing = await self._objects.list(READY, limits.MAX_CATALOG)
        found = [m for f in listing if (m := ReadyMarker.parse(f.name)) is not None]
        fresh = [m for m in found if m.id not in self.entries]
        read = (self._read_marker(marker, run_key) for marker in fresh)
        failures = [e for e in await asyncio.gather(*read, return_exceptions=True) if e is not None]
        listed = {m.id for m in found}
        self.entries = {a: e for a, e in self.entries.items() if a in listed}
        self._manifests = {a: m for a, m in self._manifests.items() if a in listed}
        self.seen_at = {a: at for a, at in self.seen_at.items() if a in listed}
        for error in failures:
            if not isinstance(error, P2PCastError):
                raise error
        return bool(fresh), next((e for e in failures if isinstance(e, P2PCastError)), None)

    async def _read_marker(self, marker: ReadyMarker, run_key: bytes) -> None:
        async with self._room:
            try:
                signed = await self._objects.get(str(marker), limits.MAX_MANIFEST_BYTES)
            except ObjectMissingError:
                return  # removed since it was listed
        with self.blaming(str(marker)):
            manifest = Manifest.from_signed(signed, run_key)
            said = ReadyMarker(manifest.version, manifest.base, manifest.artifact)
            if (said, manifest.run) != (marker, self._run):
                raise IntegrityError(f"mirror: {marker} speaks of another artifact")
        now = asyncio.get_running_loop().time()
        self._manifests[marker.id] = signed
        self.seen_at[marker.id] = now
        self.entries[marker.id] = Entry(
            manifest.kind, manifest.base, manifest.version, manifest.log, manifest.layout, manifest.state, True, now
        )

    async def directory(
        self, artifact: bytes, run_key: bytes, layouts: Mapping[bytes, Layout], verify: Verify
    ) -> tuple[Tail, Layout]:
        """Fetch and verify the directory of an entry. Raises IntegrityError, RetryableError."""
        entry, signed = self.entries[artifact], self._manifests[artifact]
        manifest, name = Manifest.from_signed(signed, run_key), tail_name(artifact)
        most = most_tail_bytes(manifest.pieces, manifest.batches, manifest.cells)
        with self.blaming(name):
            async with self._room:
                data = await self._objects.get(name, most)
            tail = Tail.from_bytes(data, f"mirror: tail of {entry.version}")
            if tail.key != run_key or tail.manifest != signed:
                raise IntegrityError(f"mirror: the tail of {entry.version} is not what its marker speaks of")
            layout = layouts.get(entry.layout) or Layout.from_document(tail.layout)
            if layout.layout_id != entry.layout:
                raise IntegrityError(f"mirror: the tail of {entry.version} has another layout")
            # Every signature is checked before any record is used.
            await verify(tail, layout)
        return tail, layout

    # -- complaints

    @contextlib.contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """Context manager that records ``name`` for the hub if its block finds a wrong or missing object."""
        try:
            yield
        except (IntegrityError, ObjectMissingError, ShortError):
            if len(self._wrong) < limits.MAX_BAD_OBJECTS:
                self._wrong[name] = None
            raise

    def take_complaints(self) -> list[str]:
        """Return and clear the names of objects found wrong or missing since the last call."""
        names, self._wrong = list(self._wrong), {}
        return names
