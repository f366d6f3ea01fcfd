"""Verified pieces on their way to disk, off the event loop.

Promises: what waits is bounded (``backlog_bytes`` against BACKLOG_HIGH_BYTES tells the owner to stop reading); neighbouring pieces go out in one system call; until
a piece is on disk, it can be had from here.

A trip to another thread costs a dozen hand-overs of the interpreter lock, and large writes cost the kernel a third of small ones: so pieces and records gather until
there are STEP_BYTES, for GATHER_S at most, unless somebody waits for the last of them (``flush``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor

from p2pcast.errors import P2PCastError
from p2pcast.limits import MIB
from p2pcast.store.journal import Record
from p2pcast.store.log import Log

BACKLOG_HIGH_BYTES = 32 * MIB
"""Verified but not yet written: above it a node stops reading from its parent."""
BACKLOG_LOW_BYTES = 8 * MIB
STEP_BYTES = 4 * MIB
"""Written in one trip to the disk's thread."""
GATHER_S = 0.05

Pieces = dict[int, memoryview]
Stored = Callable[[bytes, list[int]], None]
Failed = Callable[[bytes, P2PCastError], None]


class WriteBack:
    """``stored(artifact, pieces)`` and ``failed(artifact, error)`` are called on the loop."""

    def __init__(self, executor: Executor, stored: Stored, failed: Failed) -> None:
        self._executor = executor
        self._stored = stored
        self._failed = failed
        self._pending: dict[bytes, tuple[Log, int, Pieces]] = {}
        self._notes: dict[bytes, tuple[Log, list[Record]]] = {}
        self._writing: tuple[bytes, Pieces] = (b"", {})
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        """Enough has gathered, or what there is may not wait."""
        self._flush = False
        self.backlog_bytes = 0

    def submit(self, artifact: bytes, log: Log, piece_bytes: int, index: int, payload: memoryview) -> None:
        if artifact not in self._pending:
            self._pending[artifact] = (log, piece_bytes, {})
        self._pending[artifact][2][index] = payload
        self.backlog_bytes += len(payload)
        self._wake.set()
        if self.backlog_bytes >= STEP_BYTES:
            self._full.set()

    def note(self, artifact: bytes, log: Log, record: Record) -> None:
        """A signed record, to be written before the pieces that it vouches for."""
        self._notes.setdefault(artifact, (log, []))[1].append(record)
        self._wake.set()

    def flush(self) -> None:
        """Write what waits now: nothing will follow soon."""
        self._flush = True
        self._full.set()

    def get(self, artifact: bytes, index: int) -> memoryview | None:
        """A piece that is not known to be on disk yet."""
        pending = self._pending.get(artifact)
        payload = pending[2].get(index) if pending else None
        if payload is None and self._writing[0] == artifact:
            payload = self._writing[1].get(index)
        return payload

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._full.wait()
            # Of each artifact once: none waits for another's to gather.
            for _ in range(max(1, len(self._pending))):
                await self._write_some()
            if not (self._pending or self._notes):
                self._wake.clear()
                self._flush = False
            if not self._flush and self.backlog_bytes < STEP_BYTES:
                self._full.clear()

    async def _write_some(self) -> None:
        """All the records, and one step of the artifact that has waited longest, in one trip."""
        notes, self._notes = self._notes, {}
        step: Pieces = {}
        artifact, log, piece_bytes = b"", None, 0
        if self._pending:
            artifact, (log, piece_bytes, pieces) = next(iter(self._pending.items()))
            step = pieces
            if len(pieces) * piece_bytes > STEP_BYTES:
                step = dict(sorted(pieces.items())[: max(1, STEP_BYTES // piece_bytes)])
                for index in step:
                    del pieces[index]
            else:
                del self._pending[artifact]
        self._writing = (artifact, step)
        loop = asyncio.get_running_loop()
        failed: dict[bytes, P2PCastError] = {}
        try:
            failed = await loop.run_in_executor(self._executor, _carry, notes, artifact, log, piece_bytes, step)
        finally:
            self.backlog_bytes -= sum(map(len, step.values()))
            self._writing = (b"", {})
        # Told last: who is told looks at the backlog.
        if step and artifact not in failed:
            self._stored(artifact, list(step))
        for each, error in failed.items():
            self._failed(each, error)


def _carry(
    notes: dict[bytes, tuple[Log, list[Record]]], artifact: bytes, log: Log | None, piece_bytes: int, step: Pieces
) -> dict[bytes, P2PCastError]:
    """Records first: they vouch for the pieces. What could not be written, by artifact."""
    failed: dict[bytes, P2PCastError] = {}
    for each, (journalled, records) in notes.items():
        try:
            journalled.note(records)
        except P2PCastError as error:
            failed[each] = error
    if log is not None:
        try:
            _write(log, piece_bytes, step)
        except P2PCastError as error:
            failed[artifact] = error
    return failed


def _write(log: Log, piece_bytes: int, pieces: Pieces) -> None:
    run: list[memoryview] = []
    first = -1
    for index, payload in sorted(pieces.items()):
        if run and index != first + len(run):
            log.write(first * piece_bytes, run)
            run = []
        if not run:
            first = index
        run.append(payload)
    if run:
        log.write(first * piece_bytes, run)
