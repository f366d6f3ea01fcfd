"""Verified pieces on their way to disk, off the event loop.

Promises: what waits is bounded (``backlog_bytes`` against BACKLOG_HIGH_BYTES tells the owner to stop reading); neighbouring pieces go out in one system call; until
a piece is on disk, it can be had from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from p2pcast.errors import P2PCastError
from p2pcast.limits import MIB
from p2pcast.store.log import Log

BACKLOG_HIGH_BYTES = 32 * MIB
"""Verified but not yet written: above it a node stops reading from its parent."""
BACKLOG_LOW_BYTES = 8 * MIB

GATHER_BYTES = 2 * MIB
GATHER_S = 0.003
"""A trip to another thread costs as much as a piece: with less than this waiting, it is worth this long to gather more."""

Stored = Callable[[bytes, list[int]], None]
Failed = Callable[[bytes, P2PCastError], None]


class WriteBack:
    """``stored(artifact, pieces)`` and ``failed(artifact, error)`` are called on the loop."""

    def __init__(self, executor: Executor, stored: Stored, failed: Failed) -> None:
        self._executor = executor
        self._stored = stored
        self._failed = failed
        self._pending: dict[bytes, tuple[Log, int, dict[int, memoryview]]] = {}
        self._writing: dict[bytes, dict[int, memoryview]] = {}
        self._wake = asyncio.Event()
        self.backlog_bytes = 0

    def submit(self, artifact: bytes, log: Log, piece_bytes: int, index: int, payload: memoryview) -> None:
        if artifact not in self._pending:
            self._pending[artifact] = (log, piece_bytes, {})
        self._pending[artifact][2][index] = payload
        self.backlog_bytes += len(payload)
        self._wake.set()

    def get(self, artifact: bytes, index: int) -> memoryview | None:
        """A piece that is not known to be on disk yet."""
        pending = self._pending.get(artifact)
        payload = pending[2].get(index) if pending else None
        return payload if payload is not None else self._writing.get(artifact, {}).get(index)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if self.backlog_bytes < GATHER_BYTES:
                await asyncio.sleep(GATHER_S)
            self._wake.clear()
            work, self._pending = self._pending, {}
            self._writing = {artifact: pieces for artifact, (_, _, pieces) in work.items()}
            for artifact, (log, piece_bytes, pieces) in work.items():
                size = sum(map(len, pieces.values()))
                error: P2PCastError | None = None
                try:
                    await loop.run_in_executor(self._executor, _write, log, piece_bytes, pieces)
                except P2PCastError as failure:
                    error = failure
                finally:
                    self.backlog_bytes -= size
                    del self._writing[artifact]
                # Told last: who is told looks at the backlog.
                if error is None:
                    self._stored(artifact, list(pieces))
                else:
                    self._failed(artifact, error)


def _write(log: Log, piece_bytes: int, pieces: dict[int, memoryview]) -> None:
    run: list[memoryview] = []
    first = -1
    for index in sorted(pieces):
        if run and index != first + len(run):
            log.write(first * piece_bytes, run)
            run = []
        if not run:
            first = index
        run.append(pieces[index])
    if run:
        log.write(first * piece_bytes, run)
