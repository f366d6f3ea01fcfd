"""Writes verified pieces to disk, off the event loop.

Promises:

- The backlog is bounded (the owner compares ``backlog_bytes`` with BACKLOG_HIGH_BYTES and stops reading).
- Neighbouring pieces are written in one system call.
- A piece can be read from memory until it is on disk.
- A resource shortage (a full disk, no free descriptor) ends ``run``. Nothing is lost: the next call continues.

Handing work to a different thread costs a dozen hand-overs of the GIL, and one large write costs the kernel a third of
several small ones. So pieces and records are collected up to STEP_BYTES, for at most GATHER_S, unless a caller is
waiting for the last of them (``flush``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor

from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.limits import MIB
from p2pcast.process.shortages import shortage
from p2pcast.store.artifact_journal import Record
from p2pcast.store.artifact_log import ArtifactLog

BACKLOG_HIGH_BYTES = 32 * MIB
"""Verified but unwritten bytes above which a node stops reading from its parent."""
BACKLOG_LOW_BYTES = 8 * MIB
STEP_BYTES = 4 * MIB
"""Most bytes of pieces written in one call to the disk thread."""
GATHER_S = 0.05

Pieces = dict[int, memoryview]
Stored = Callable[[bytes, list[int]], None]
Failed = Callable[[bytes, P2PCastError], None]


class WriteBehind:
    """``stored(artifact, pieces)`` and ``failed(artifact, error)`` are called on the event loop."""

    def __init__(self, executor: Executor, stored: Stored, failed: Failed) -> None:
        self._executor = executor
        self._stored = stored
        self._failed = failed
        self._pending: dict[bytes, tuple[ArtifactLog, int, Pieces]] = {}
        self._notes: dict[bytes, tuple[ArtifactLog, list[Record]]] = {}
        self._writing: tuple[bytes, Pieces] = (b"", {})
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        """Set once enough bytes are collected, or if they must be written at once."""
        self._flush = False
        self.backlog_bytes = 0

    def submit(self, artifact: bytes, log: ArtifactLog, piece_bytes: int, index: int, payload: memoryview) -> None:
        if artifact not in self._pending:
            self._pending[artifact] = (log, piece_bytes, {})
        self._pending[artifact][2][index] = payload
        self.backlog_bytes += len(payload)
        self._wake.set()
        if self.backlog_bytes >= STEP_BYTES:
            self._full.set()

    def note(self, artifact: bytes, log: ArtifactLog, record: Record) -> None:
        """Queue a signed record, to be written before the pieces whose hashes it signs."""
        self._notes.setdefault(artifact, (log, []))[1].append(record)
        self._wake.set()

    def flush(self) -> None:
        """Write all queued bytes now; for when no more are expected soon."""
        self._flush = True
        self._full.set()

    def get(self, artifact: bytes, index: int) -> memoryview | None:
        """Return a piece that may not be on disk yet; None for other pieces."""
        pending = self._pending.get(artifact)
        payload = pending[2].get(index) if pending else None
        if payload is None and self._writing[0] == artifact:
            payload = self._writing[1].get(index)
        return payload

    async def run(self) -> None:
        """Run until cancelled. Raises an artifact's error in a resource shortage; call it again then."""
        while True:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await self._full.wait()
            # Each artifact gets a turn, so none waits until a different one has collected a step.
            for _ in range(max(1, len(self._pending))):
                await self._write_some()
            if not (self._pending or self._notes):
                self._wake.clear()
                self._flush = False
            if not self._flush and self.backlog_bytes < STEP_BYTES:
                self._full.clear()

    async def _write_some(self) -> None:
        """Write all records, and a step of the artifact that has waited longest, in one call to the disk thread."""
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
            failed = await loop.run_in_executor(self._executor, _write_step, notes, artifact, log, piece_bytes, step)
        finally:
            self.backlog_bytes -= sum(map(len, step.values()))
            self._writing = (b"", {})
        short = {each: error for each, error in failed.items() if shortage(error) is not None}
        for each in short:
            if each in notes:
                self._notes[each] = notes[each][0], notes[each][1] + self._notes.get(each, (None, []))[1]
        if log is not None and artifact in short:
            self._put_back(artifact, log, piece_bytes, step)
        # Report last: the callback reads the backlog.
        if step and artifact not in failed:
            self._stored(artifact, list(step))
        for each in failed.keys() - short.keys():
            self._failed(each, failed[each])
        if short:
            raise next(iter(short.values()))

    def _put_back(self, artifact: bytes, log: ArtifactLog, piece_bytes: int, step: Pieces) -> None:
        """Queue a failed step again, behind the other artifacts, which may be on a different disk."""
        pieces = self._pending.pop(artifact, (log, piece_bytes, {}))[2]
        self._pending[artifact] = (log, piece_bytes, {**step, **pieces})
        self.backlog_bytes += sum(map(len, step.values()))


def _write_step(
    notes: dict[bytes, tuple[ArtifactLog, list[Record]]],
    artifact: bytes,
    log: ArtifactLog | None,
    piece_bytes: int,
    step: Pieces,
) -> dict[bytes, P2PCastError]:
    """Write records, then pieces, since the records sign the pieces. Returns the errors by artifact."""
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


def _write(log: ArtifactLog, piece_bytes: int, pieces: Pieces) -> None:
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
