"""Reading ahead from the store, for children whose next pieces are no longer in memory.

Promises:

- For one child, no more pieces are read at once than the cache can hold together.
- A piece that several children need at the same time is read once.
- A piece that the disk damaged is not passed on, and ends the links of those children alone that need it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import blake3

from p2pcast.daemon.background_tasks import spawn
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RemoteError
from p2pcast.relay.holding import Holding
from p2pcast.relay.send_schedule import ChildSchedules
from p2pcast.relay.tuning import READ_AHEAD_BYTES, READ_AHEAD_PIECES
from p2pcast.transport.link import Link


class PieceCache(Protocol):
    @property
    def most_bytes(self) -> int: ...

    def put(self, artifact: bytes, index: int, payload: bytes | memoryview) -> None: ...


class PieceStore(Protocol):
    """A node's pieces, in memory and on disk."""

    @property
    def holdings(self) -> Mapping[bytes, Holding]: ...

    @property
    def cache(self) -> PieceCache: ...

    @property
    def disk(self) -> Executor:
        """Threads for reading."""

    def payload(self, holding: Holding, index: int) -> bytes | memoryview | None:
        """A held piece, if it is in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A read that is under way."""

    holding: Holding
    indices: range
    pieces: asyncio.Future[list[memoryview]]


class ReadAhead:
    """Reads into ``node.cache`` on the node's disk threads; one run at a time for each child."""

    def __init__(self, node: PieceStore) -> None:
        self._node = node
        self._reads: dict[Link, asyncio.Task[None]] = {}
        self._loads: dict[tuple[bytes, int], Load] = {}
        """(artifact, piece) -> the read that brings it."""

    def close(self) -> None:
        for task in self._reads.values():
            task.cancel()

    def begin(self, link: Link, schedules: ChildSchedules, pump: Callable[[], None]) -> None:
        """Without effect while this child's run is under way. ``pump`` is called whenever more pieces are in memory."""
        if link not in self._reads:
            work = self._read(link, schedules, pump)
            self._reads[link] = spawn(work, f"read ahead for {link.name}")

    async def _read(self, link: Link, schedules: ChildSchedules, pump: Callable[[], None]) -> None:
        try:
            absent = self._absent(link, schedules)
            for load in [load for holding, indices in absent for load in self._loading(holding, indices)]:
                pieces = await asyncio.shield(load.pieces)
                for index, payload in zip(load.indices, pieces, strict=True):
                    self._node.cache.put(load.holding.id, index, payload)
                # Send at once: reads for other children may soon evict these pieces.
                pump()
        except P2PCastError as error:
            link.close(error)
        except Exception:
            link.close(LocalError("this node failed to read its store; see its log"))
            raise
        finally:
            del self._reads[link]
        pump()

    def _loading(self, holding: Holding, indices: range) -> Iterator[Load]:
        """The reads that bring these pieces; those of other children, where they have begun."""
        at = indices.start
        while at < indices.stop:
            load = self._loads.get((holding.id, at))
            if load is None:
                begun = (index for index in range(at, indices.stop) if (holding.id, index) in self._loads)
                load = self._begin(holding, range(at, next(begun, indices.stop)))
            yield load
            at = load.indices.stop

    def _begin(self, holding: Holding, indices: range) -> Load:
        pieces = asyncio.get_running_loop().run_in_executor(self._node.disk, read_pieces, holding, indices)
        load = Load(holding, indices, pieces)
        self._loads |= dict.fromkeys(((holding.id, index) for index in indices), load)
        pieces.add_done_callback(lambda _: self._ended(load))
        return load

    def _ended(self, load: Load) -> None:
        for index in load.indices:
            del self._loads[load.holding.id, index]
        if not load.pieces.cancelled():
            # Each child that waits gets the error; none may be left.
            load.pieces.exception()

    def _absent(self, link: Link, schedules: ChildSchedules) -> list[tuple[Holding, range]]:
        """Runs of pieces that the child needs soon and memory lacks."""
        runs: list[tuple[Holding, range]] = []
        # Never more than the cache holds together: else the last pieces evict the first, and nothing is ever sent.
        room = min(READ_AHEAD_BYTES, self._node.cache.most_bytes // 2)
        for send in schedules.upcoming(READ_AHEAD_PIECES):
            holding = self._node.holdings.get(send.artifact.id)
            if holding is None:
                # Retention removed the artifact. The child has to fetch it from another node.
                link.close(RemoteError(f"artifact {send.artifact.id.hex()} is no longer held here"))
                return []
            if self._node.payload(holding, send.index) is not None:
                continue
            room -= holding.open.piece
            if runs and room < 0:
                break
            if runs and runs[-1][0] is holding and runs[-1][1].stop == send.index:
                runs[-1] = (holding, range(runs[-1][1].start, send.index + 1))
            else:
                runs.append((holding, range(send.index, send.index + 1)))
        return runs


def read_pieces(holding: Holding, indices: range) -> list[memoryview]:
    """Held pieces from the log, in one read. Each piece's hash is checked again. Raises IntegrityError."""
    assembly, piece = holding.assembly, holding.assembly.open.piece
    data = memoryview(holding.log.read(indices.start * piece, len(indices) * piece, short=True))
    # Ask for the size after the read: a seal in between appends to the file behind the last, shorter piece.
    last = assembly.piece_bytes(indices[-1])
    data = data[: (len(indices) - 1) * piece + (piece if last is None else last)]
    pieces = [data[at * piece : (at + 1) * piece] for at in range(len(indices))]
    for index, payload in zip(indices, pieces, strict=True):
        if blake3.blake3(payload).digest() != assembly.piece_hash(index):
            raise IntegrityError(f"piece {index} of {assembly.open.version} is damaged in the store of this node")
    return pieces
