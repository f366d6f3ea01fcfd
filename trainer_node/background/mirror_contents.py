"""Builds the contents of a mirror's objects from the hub's own store whenever they are needed.

Guarantees: the bytes are the same each time. Objects are read and hashed in a separate thread, never in those that
serve peers. A piece that does not match its hash is never returned.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import blake3

from p2pcast.artifact.artifact_file import Tail
from p2pcast.ground.errors import IntegrityError
from p2pcast.mirror.object_names import KEY, SLICE_BYTES, slice_bytes, slice_of, slices, tail_of
from p2pcast.mirror.suspect_objects import artifact_of
from p2pcast.store.artifact_store import ArtifactStore, Stored


class MirrorContents:
    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "p2pcast-mirror")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def of(self, name: str) -> bytes | None:
        """Return an object's contents; None if no stored artifact contains it. Raises LocalError or IntegrityError."""
        if name == KEY:
            return self._store.run_key
        artifact, part = artifact_of(name), slice_of(name)
        stored = self._store.artifacts.get(artifact or b"")
        if stored is None:
            return None
        if part is not None:
            return await self.slice(stored, part[1]) if part[1] < slices(stored.manifest.log) else None
        return self.tail(stored) if tail_of(name) is not None else self.marker(stored)

    async def slice(self, stored: Stored, number: int) -> bytes:
        """Return a slice of an artifact's log. Raises LocalError or IntegrityError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _read, self._store, stored, number)

    def tail(self, stored: Stored) -> bytes:
        return Tail.of(stored.assembly).to_bytes()

    def marker(self, stored: Stored) -> bytes:
        signed = stored.assembly.manifest_signed
        assert signed is not None
        return signed


def _read(store: ArtifactStore, stored: Stored, number: int) -> bytes:
    """Return a slice of the log after verifying each of its pieces."""
    log, piece, size = store.open_log(stored), stored.assembly.open.piece, slice_bytes(stored.manifest.log, number)
    try:
        data = log.read(number * SLICE_BYTES, size)
    finally:
        log.close()
    view, first = memoryview(data), number * SLICE_BYTES // piece
    for at in range(0, size, piece):
        if blake3.blake3(view[at : at + piece]).digest() != stored.assembly.piece_hash(first + at // piece):
            raise IntegrityError(f"piece {first + at // piece} of {stored.version} is damaged in the store of this hub")
    return data
