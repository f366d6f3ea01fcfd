"""Pieces on their way to disk: collected, in order, records first; a failure is reported for its own artifact only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from p2pcast.ground.errors import LocalError, P2PCastError
from p2pcast.store import write_behind
from p2pcast.store.artifact_journal import JournalKind, Record
from p2pcast.store.write_behind import STEP_BYTES, WriteBehind

PIECE = 1 << 16
A, B = b"a" * 16, b"b" * 16


class RecordingLog:
    """A log that records its calls."""

    def __init__(self, said: list[tuple[str, object]], *, broken: str = "") -> None:
        self.said, self.broken = said, broken
        self.bytes: dict[int, bytes] = {}

    def write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        self._say("write", (offset, len(parts)))
        for part in parts:
            self.bytes[offset] = bytes(part)
            offset += len(part)

    def note(self, records: Sequence[Record]) -> None:
        self._say("note", [body for _, body in records])

    def _say(self, what: str, how: object) -> None:
        self.said.append((what, how))
        if self.broken == what:
            raise LocalError("no space is left")

    def read(self, offset: int, size: int, *, short: bool = False) -> bytes:
        raise AssertionError

    def close(self) -> None: ...


class Heard:
    def __init__(self) -> None:
        self.stored: dict[bytes, list[int]] = {}
        self.failed: dict[bytes, str] = {}
        self._any = asyncio.Event()

    def on_stored(self, artifact: bytes, pieces: list[int]) -> None:
        self.stored.setdefault(artifact, []).extend(pieces)
        self._any.set()

    def on_failed(self, artifact: bytes, error: P2PCastError) -> None:
        self.failed[artifact] = str(error)
        self._any.set()

    async def next(self) -> None:
        self._any.clear()
        await self._any.wait()


@asynccontextmanager
async def running() -> AsyncIterator[tuple[WriteBehind, Heard]]:
    with ThreadPoolExecutor(1) as executor:
        heard = Heard()
        back = WriteBehind(executor, heard.on_stored, heard.on_failed)
        task = asyncio.create_task(back.run())
        try:
            yield back, heard
        finally:
            task.cancel()


def payload(index: int) -> memoryview:
    return memoryview(bytes([index % 251]) * PIECE)


@pytest.fixture(autouse=True)
def _disable_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the gathering timeout."""
    monkeypatch.setattr(write_behind, "GATHER_S", 3600.0)


async def test_pieces_are_collected_and_written_in_one_run() -> None:
    said: list[tuple[str, object]] = []
    log = RecordingLog(said)
    async with running() as (back, heard):
        count = STEP_BYTES // PIECE
        for index in reversed(range(1, count)):
            back.submit(A, log, PIECE, index, payload(index))
            await asyncio.sleep(0)
        assert not said
        assert back.get(A, 7) == payload(7)
        back.submit(A, log, PIECE, 0, payload(0))
        await heard.next()
        assert said == [("write", (0, count))]
        assert sorted(heard.stored[A]) == list(range(count))
        assert log.bytes == {i * PIECE: bytes(payload(i)) for i in range(count)}
        assert back.backlog_bytes == 0
        assert back.get(A, 7) is None


async def test_flush_writes_waiting_pieces_at_once() -> None:
    said: list[tuple[str, object]] = []
    async with running() as (back, heard):
        for index in (0, 1, 5):
            back.submit(A, RecordingLog(said), PIECE, index, payload(index))
        back.flush()
        await heard.next()
        assert said == [("write", (0, 2)), ("write", (5 * PIECE, 1))]
        # Later pieces are collected again.
        back.submit(A, RecordingLog(said), PIECE, 6, payload(6))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(said) == 2


async def test_backlog_of_several_steps_is_written_completely() -> None:
    said: list[tuple[str, object]] = []
    log = RecordingLog(said)
    async with running() as (back, heard):
        count = 2 * STEP_BYTES // PIECE + 3
        for index in range(count):
            back.submit(A, log, PIECE, index, payload(index))
        back.flush()
        while len(heard.stored.get(A, [])) < count:
            await heard.next()
        assert len(log.bytes) == count
        assert back.backlog_bytes == 0


async def test_artifacts_do_not_wait_for_each_other() -> None:
    said: list[tuple[str, object]] = []
    async with running() as (back, heard):
        back.submit(B, RecordingLog(said), PIECE, 0, payload(0))
        for index in range(STEP_BYTES // PIECE - 1):
            back.submit(A, RecordingLog(said), PIECE, index, payload(index))
        while len(heard.stored) < 2:
            await heard.next()
        assert heard.stored[B] == [0]
        assert len(heard.stored[A]) == STEP_BYTES // PIECE - 1


async def test_records_are_written_before_their_pieces() -> None:
    said: list[tuple[str, object]] = []
    log = RecordingLog(said)
    async with running() as (back, heard):
        back.note(A, log, (JournalKind.OPEN, b"open"))
        back.submit(A, log, PIECE, 0, payload(0))
        back.note(A, log, (JournalKind.BATCH, b"batch"))
        back.flush()
        await heard.next()
        assert said == [("note", [b"open", b"batch"]), ("write", (0, 1))]


@pytest.mark.parametrize("broken", ["note", "write"])
async def test_failure_is_reported_for_its_own_artifact(broken: str) -> None:
    said: list[tuple[str, object]] = []
    async with running() as (back, heard):
        for artifact, log in ((A, RecordingLog(said, broken=broken)), (B, RecordingLog(said))):
            back.note(artifact, log, (JournalKind.OPEN, artifact))
            back.submit(artifact, log, PIECE, 0, payload(0))
        back.flush()
        while not (heard.failed and heard.stored):
            await heard.next()
        assert list(heard.failed) == [A]
        assert heard.stored == {B: [0]}
        assert back.backlog_bytes == 0
