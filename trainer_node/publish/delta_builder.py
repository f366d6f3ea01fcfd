"""A delta under construction: encoded cells are written to the log, and their pieces signed, whatever their source.

Guarantees: pieces are sent while later cells are still being encoded or received. Memory is bounded: by a few cells per
core for a folder, and by the limit of ``Incoming`` for ranks. Cells from ranks are decoded, or encoded here, before
they are signed, so every piece that is sent decodes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import blake3

from p2pcast.artifact.packer import Packer
from p2pcast.artifact.signed_records import FileEntry
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.cell import Encoded
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.encode_cell import encode_as_chosen, recode_in_context
from p2pcast.codec.join_parts import join
from p2pcast.codec.layout import Cell, cell_bytes
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.ordered_map import cores, ordered_map
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_log import ArtifactLog
from trainer_node.publish.rank_parts import Complete

T = TypeVar("T")

EMIT_S = 0.02
"""Interval between two signed batches, in seconds. Every peer verifies one signature per batch, which costs as much as
hashing 1 MiB.
"""


class DeltaBuilder:
    """Packs the cells, then the small files, of one delta. One thread at a time uses it, and calls ``emit(batch)``.

    ``changed``: words so far. ``payload_bytes``: bytes of their cells. ``growth``: change of the state's digest.
    """

    def __init__(self, packer: Packer, log: ArtifactLog, emit: Callable[[bytes], Any]) -> None:
        self.changed = self.growth = self.payload_bytes = 0
        self._packer = packer
        self._log = log
        self._emit = emit
        self._emitted = time.monotonic()
        self._stopped = False

    def add(self, coded: Encoded) -> None:
        """Add the next cell. Raises LocalError (full disk), and RetryableError after ``stop``."""
        if self._stopped:
            raise RetryableError("the version was given up while it was made")
        self._log.write(self._packer.log_bytes, [coded.payload])
        self._packer.add_cell(coded.cell, coded.codec, coded.payload, coded.before, coded.after)
        self.changed += coded.changed
        self.payload_bytes += len(coded.payload)
        self.growth += coded.after - coded.before
        if time.monotonic() - self._emitted > EMIT_S:
            self.emit()

    def emit(self) -> None:
        """Sign and emit all complete pieces."""
        while (batch := self._packer.take_batch()) is not None:
            self._emit(batch)
        self._emitted = time.monotonic()

    def add_files(self, files: dict[str, bytes], known: dict[str, bytes]) -> None:
        """Add the small files. ``known``: path → BLAKE3 of the base's small files, which are not sent again."""
        for path, contents in sorted(files.items()):
            name = blake3.blake3(contents).digest()
            if known.get(path) == name:
                self._packer.add_file(path, None, len(contents), name)
            else:
                if contents:
                    self._log.write(self._packer.log_bytes, [contents])
                self._packer.add_file(path, contents, len(contents), name)

    def repeat_files(self, known: Iterable[FileEntry]) -> None:
        """Keep the base's small files."""
        for file in known:
            self._packer.add_file(file.path, None, file.size, file.hash)

    def stop(self) -> None:
        """Give the version up: a thread that still adds cells gets an error."""
        self._stopped = True


def encode_folder(checkpoint: Checkpoint, shadow: Shadow, packing: DeltaBuilder, choice: Choice) -> None:
    """Encode all of a folder's cells against the shadow, on all cores. Blocks until the last one is packed."""

    def coded(cell: Cell) -> Encoded | None:
        return encode_as_chosen(cell, shadow.words(cell), checkpoint.lent(cell), shadow.mark(cell.index), choice)

    for one in ordered_map(coded, shadow.layout.cells, workers=cores(), name="encode", nbytes=cell_bytes):
        if one is not None:
            packing.add(one)


# -- from ranks


class Incoming(Protocol):
    """A version's cells from ranks."""

    async def take(self) -> list[Complete]:
        """Wait for the next complete cells and return them, ascending; none once all have been taken. Raises the error
        that made the version fail.
        """

    def settled(self, nbytes: int) -> None:
        """Called when payloads of this many bytes have been freed."""

    @property
    def files(self) -> dict[str, bytes] | None:
        """The version's small files, or None if none were sent; known once all cells have been taken."""


async def join_incoming(
    incoming: Incoming, shadow: Shadow, packing: DeltaBuilder, choice: Choice, staging: Staging
) -> None:
    """Join all cells from ranks, against the shadow. Raises IntegrityError for parts that do not match their digests.

    If ``context`` was chosen, ranks use it for cells that they own whole; joined cells are encoded here.
    """
    context = choice.codec == "context"
    codec = "auto" if context or choice.times is not None else choice.codec

    def coded(found: Complete) -> Encoded | None:
        cell = found.cell
        joined = join(cell, found.parts, shadow.words(cell), shadow.mark(cell.index), codec=codec)
        return recode_in_context(cell, joined, shadow.words(cell)) if context and joined is not None else joined

    def pack(row: list[Encoded | None], idle: bool) -> None:
        for one in row:
            if one is not None:
                packing.add(one)
        if idle:
            packing.emit()

    await each(incoming, coded, pack, staging)


async def each(
    incoming: Incoming, work: Callable[[Complete], T], keep: Callable[[list[T], bool], None], staging: Staging
) -> None:
    """Apply ``work`` to every cell, on all cores. ``keep`` receives the results in the cells' order, in a thread, one
    call at a time.

    Its flag tells ``keep`` that no more results are available yet. After a failure, no work is left running.
    """
    running: deque[tuple[asyncio.Future[T], int]] = deque()
    waiting: deque[Complete] = deque()
    more: asyncio.Future[list[Complete]] | None = asyncio.ensure_future(incoming.take())
    try:
        while more is not None or running or waiting:
            while waiting and len(running) < 2 * staging.workers:
                found = waiting.popleft()
                running.append((staging.run_on_all_cores(work, found), found.bytes))
            heads: list[asyncio.Future[Any]] = [future for future, _ in list(running)[:1]]
            await asyncio.wait(heads if more is None else [*heads, more], return_when=asyncio.FIRST_COMPLETED)
            if more is not None and more.done():
                taken = more.result()
                waiting.extend(taken)
                more = asyncio.ensure_future(incoming.take()) if taken else None
            row: list[T] = []
            nbytes = 0
            while running and running[0][0].done():
                future, size = running.popleft()
                row.append(future.result())
                nbytes += size
            if row:
                await staging.run(keep, row, not running and not waiting)
                incoming.settled(nbytes)
    finally:
        if more is not None:
            more.cancel()
        # Not cancelled: a running thread would continue unnoticed, and write to memory that may be reused by then.
        left: list[asyncio.Future[Any]] = [future for future, _ in running]
        left += [] if more is None else [more]
        if left:
            await asyncio.wait(left)
        for future in left:
            if not future.cancelled():
                future.exception()
