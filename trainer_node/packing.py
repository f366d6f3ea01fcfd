"""A delta while it is being made: coded cells go into the log, and their pieces are vouched for, wherever the cells come from.

Promises: pieces leave while later cells are still being coded, or have not come yet; what is in memory is bounded, by a few cells a core for a
folder and by what ``Incoming`` lets wait for ranks; what ranks sent is decoded, or coded, before it is signed, so nothing goes out that does not
decode.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import blake3
import numpy.typing as npt

from p2pcast.artifact.packer import Packer
from p2pcast.artifact.records import FileEntry
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.cell import DENSE_PAYS_FROM, FLAT, Encoded, apply, decode, encode
from p2pcast.codec.choice import Choice
from p2pcast.codec.join import join
from p2pcast.codec.layout import Cell
from p2pcast.errors import RetryableError
from p2pcast.parallel import cores, ordered_map
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.log import Log
from trainer_node.intake import Complete

T = TypeVar("T")
Words = npt.NDArray[Any]

EMIT_S = 0.02
"""Pieces are vouched for this often: every peer checks a signature a batch, which costs as much as hashing a MiB."""


class Packing:
    """Cells, then small files, of one delta. Used by one thread at a time; ``emit(batch)`` is called on it.

    ``changed``: words so far; ``payload_bytes``: of their cells; ``growth``: of the state's digest.
    """

    def __init__(self, packer: Packer, log: Log, emit: Callable[[bytes], Any]) -> None:
        self.changed = self.growth = self.payload_bytes = 0
        self._packer = packer
        self._log = log
        self._emit = emit
        self._emitted = time.monotonic()
        self._stopped = False

    def add(self, coded: Encoded) -> None:
        """The next cell. Raises LocalError (full disk)."""
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
        """Vouch for all pieces that are whole."""
        while (batch := self._packer.take_batch()) is not None:
            self._emit(batch)
        self._emitted = time.monotonic()

    def add_files(self, files: dict[str, bytes], known: dict[str, bytes]) -> None:
        """``known``: path → BLAKE3 of the base's small files, which are not sent again."""
        for path, contents in sorted(files.items()):
            name = blake3.blake3(contents).digest()
            if known.get(path) == name:
                self._packer.add_file(path, None, len(contents), name)
            else:
                if contents:
                    self._log.write(self._packer.log_bytes, [contents])
                self._packer.add_file(path, contents, len(contents), name)

    def repeat_files(self, known: Iterable[FileEntry]) -> None:
        """The base's small files stay."""
        for file in known:
            self._packer.add_file(file.path, None, file.size, file.hash)

    def stop(self) -> None:
        """The version was given up: a thread that still adds to it ends."""
        self._stopped = True


def code(cell: Cell, old: Words, new: Words, before: int, choice: Choice) -> Encoded | None:
    """A cell in the version's codec, or in another where so much has changed that this is smaller. What was told stays, but for ``context``, which
    may outgrow its cell."""
    coded = encode(cell, old, new, before=before, codec=choice.codec)
    told = choice.times is None and choice.codec != "context"
    if coded is None or told or len(coded.payload) * DENSE_PAYS_FROM <= cell.nbytes:
        return coded
    other = encode(cell, old, new, before=before)
    return other if other is not None and len(other.payload) < len(coded.payload) else coded


def in_context(cell: Cell, coded: Encoded, old: Words) -> Encoded:
    """The same change coded in context, where it is ``flat`` and that makes it smaller."""
    if coded.codec != FLAT:
        return coded
    new = old.copy()
    apply(decode(cell, FLAT, coded.payload, old, coded.before, coded.after, check_before=False), new)
    other = encode(cell, old, new, before=coded.before, codec="context")
    return coded if other is None or len(other.payload) >= len(coded.payload) else other


def encode_folder(checkpoint: Checkpoint, shadow: Shadow, packing: Packing, choice: Choice) -> None:
    """All cells of a folder against the shadow, on all cores. Blocks until the last is packed."""

    def coded(cell: Cell) -> Encoded | None:
        return code(cell, shadow.words(cell), checkpoint.lent(cell), shadow.mark(cell.index), choice)

    for one in ordered_map(coded, shadow.layout.cells, workers=cores(), name="encode"):
        if one is not None:
            packing.add(one)


# -- from ranks


class Incoming(Protocol):
    """A version's cells, as ranks bring them."""

    async def take(self) -> list[Complete]:
        """The next cells that are complete, ascending; none when all have been taken. Raises what ended the version."""

    def settled(self, nbytes: int) -> None:
        """Payloads that were taken are not in memory any more."""

    @property
    def files(self) -> dict[str, bytes] | None:
        """The version's small files, if any were sent; known once all cells have been taken."""


async def join_incoming(incoming: Incoming, shadow: Shadow, packing: Packing, choice: Choice, staging: Staging) -> None:
    """All cells that ranks bring, against the shadow. Raises IntegrityError for parts that are not what they say.

    Where context was chosen, ranks code in it what they own whole cells of; what was joined is coded so here.
    """
    context = choice.codec == "context"
    codec = "auto" if context or choice.times is not None else choice.codec

    def coded(found: Complete) -> Encoded | None:
        cell = found.cell
        joined = join(cell, found.parts, shadow.words(cell), shadow.mark(cell.index), codec=codec)
        return in_context(cell, joined, shadow.words(cell)) if context and joined is not None else joined

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
    """``work`` on every cell, on all cores; ``keep`` gets the results in the cells' order, in a thread, one call at a time.

    The flag of ``keep`` says that nothing more is at hand. When it fails, nothing is left running.
    """
    running: deque[tuple[asyncio.Future[T], int]] = deque()
    waiting: deque[Complete] = deque()
    more: asyncio.Future[list[Complete]] | None = asyncio.ensure_future(incoming.take())
    try:
        while more is not None or running or waiting:
            while waiting and len(running) < 2 * staging.workers:
                found = waiting.popleft()
                running.append((staging.spread(work, found), found.bytes))
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
        # Not cancelled: a thread that has begun would go on unseen, into memory that may be somebody else's by then.
        left: list[asyncio.Future[Any]] = [future for future, _ in running]
        left += [] if more is None else [more]
        if left:
            await asyncio.wait(left)
        for future in left:
            if not future.cancelled():
                future.exception()
