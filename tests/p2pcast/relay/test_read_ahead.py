"""Pieces read back from the store for children that lag."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from p2pcast.errors import IntegrityError
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import PieceCache
from p2pcast.relay.read_ahead import ReadAhead, read_pieces
from p2pcast.store.artifact_store import Store


class SealsFirst:
    """A log whose artifact another thread seals just before the read."""

    def __init__(self, log, seal):
        self.log, self.seal = log, seal

    def read(self, offset, size, *, short=False):
        self.seal()
        return self.log.read(offset, size, short=short)


@pytest.fixture
def stored(maker, tmp_path):
    made = maker.make([5000] * 9, piece=4096)
    store = Store(tmp_path, maker.key.public)
    artifact = maker.artifact(made, sealed=False)
    log = store.begin(artifact.open, maker.layout)
    log.write(0, [made.log])
    yield made, store, artifact, log
    log.close()


def test_the_last_piece_ends_where_the_log_ends(stored):
    made, _, artifact, log = stored
    last = artifact.assembly.pieces - 1
    got = read_pieces(Holding(artifact, log), range(last - 2, last + 1))
    assert [bytes(p) for p in got] == made.pieces(4096)[-3:]


def test_a_seal_during_the_read_does_not_lengthen_the_last_piece(stored):
    """In the sealed file a tail follows the log. The tail is not part of the last piece."""
    made, store, artifact, log = stored

    def seal() -> None:
        artifact.assembly.add_manifest(made.manifest)
        store.seal(log, artifact.assembly)

    last = artifact.assembly.pieces - 1
    got = read_pieces(Holding(artifact, SealsFirst(log, seal)), range(last - 2, last + 1))
    assert [bytes(p) for p in got] == made.pieces(4096)[-3:]


def test_a_piece_that_the_disk_damaged_is_not_passed_on(stored):
    made, _, artifact, log = stored
    log.write(4096, [b"?"])
    assert [bytes(p) for p in read_pieces(Holding(artifact, log), range(1))] == made.pieces(4096)[:1]
    with pytest.raises(IntegrityError, match=r"piece 1 of 0\.1 is damaged in the store"):
        read_pieces(Holding(artifact, log), range(3))


class GatedLog:
    """A log whose reads wait for the test, and are counted."""

    def __init__(self, log) -> None:
        self.log, self.gate, self.read_at = log, threading.Event(), []

    def read(self, offset, size, *, short=False):
        self.read_at.append(offset)
        assert self.gate.wait(600)
        return self.log.read(offset, size, short=short)


class Needs:
    """A child's schedules: the pieces that it needs next."""

    def __init__(self, artifact, *indices: int) -> None:
        self.sends = [SimpleNamespace(artifact=artifact, index=index) for index in indices]

    def upcoming(self, most: int):
        return self.sends[:most]


class Linked:
    """A child's link, which records why it was closed."""

    name, error = "child", None

    def close(self, error) -> None:
        self.error = error


class Reader:
    """A node's store, and children that read ahead from it."""

    def __init__(self, artifact, log) -> None:
        self.log, self.cache, self.disk = GatedLog(log), PieceCache(1 << 24), ThreadPoolExecutor(2)
        self.holdings = {artifact.id: Holding(artifact, self.log)}
        self.artifact, self.ahead = artifact, ReadAhead(self)

    def payload(self, holding, index):
        return self.cache.get(holding.id, index)

    def needs(self, *indices: int) -> tuple[Linked, asyncio.Event]:
        """A child that needs these pieces. The event is set once they are in memory, or the link is closed."""
        link, done, schedules = Linked(), asyncio.Event(), Needs(self.artifact, *indices)

        def pump() -> None:
            if link.error or all(self.cache.get(self.artifact.id, index) for index in indices):
                done.set()

        self.ahead.begin(link, schedules, pump)
        return link, done


@pytest.fixture
def reader(stored):
    _, _, artifact, log = stored
    made = Reader(artifact, log)
    yield made
    made.log.gate.set()
    made.disk.shutdown()


async def test_a_piece_that_several_children_need_is_read_once(stored, reader):
    made = stored[0]
    waits = [reader.needs(0, 1, 2), reader.needs(0, 1, 2), reader.needs(2, 3, 4), reader.needs(1)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.log.gate.set()
    async with asyncio.timeout(600):
        for _, done in waits:
            await done.wait()
    assert sorted(reader.log.read_at) == [0, 3 * 4096]
    assert [bytes(reader.cache.get(reader.artifact.id, n)) for n in range(5)] == made.pieces(4096)[:5]
    assert reader.ahead._loads == {}
    assert not any(link.error for link, _ in waits)


async def test_a_child_that_leaves_does_not_end_the_read_of_another(reader):
    gone, stays = reader.needs(0, 1), reader.needs(0, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.ahead._reads[gone[0]].cancel()
    await asyncio.sleep(0)
    reader.log.gate.set()
    async with asyncio.timeout(600):
        await stays[1].wait()
    assert stays[0].error is None
    assert reader.log.read_at == [0]


async def test_a_damaged_piece_ends_links_of_waiting_children_alone(reader):
    reader.log.log.write(4096, [b"?"])
    both, other = [reader.needs(0, 1), reader.needs(1, 2)], reader.needs(5)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reader.log.gate.set()
    async with asyncio.timeout(600):
        for _, done in [*both, other]:
            await done.wait()
    assert all(isinstance(link.error, IntegrityError) for link, _ in both)
    assert other[0].error is None
