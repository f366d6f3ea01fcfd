"""Reading ahead from the store, for children whose next pieces are no longer in memory.

Promises:

- For one child, no more pieces are read at once than fit into the cache together.
- A piece that the disk damaged or lost is not forwarded, closes only that child's link, and is reported to the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Protocol

import blake3

from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RemoteError
from p2pcast.ground.observers import Observers
from p2pcast.process.background_tasks import spawn
from p2pcast.relay.holding import Holding
from p2pcast.relay.send_schedule import ChildSchedules
from p2pcast.relay.tuning import READ_AHEAD_BYTES, READ_AHEAD_PIECES
from p2pcast.transport.link import Link


class CachedPieces(Protocol):
    @property
    def most_bytes(self) -> int: ...

    def put(self, artifact: bytes, index: int, payload: bytes | memoryview) -> None: ...


class PieceStore(Protocol):
    """A node's pieces, in memory and on disk."""

    @property
    def holdings(self) -> Mapping[bytes, Holding]: ...

    @property
    def cache(self) -> CachedPieces: ...

    @property
    def disk(self) -> Executor:
        """Threads for reading."""

    @property
    def damaged(self) -> Observers[[Holding]]:
        """Notified of an artifact of which the disk has damaged or lost a piece."""

    def payload(self, holding: Holding, index: int) -> bytes | memoryview | None:
        """A held piece, if it is in memory."""


class ReadAhead:
    """Reads into ``node.cache`` on the node's disk threads; one run at a time for each child."""

    def __init__(self, node: PieceStore) -> None:
        self._node = node
        self._reads: dict[Link, asyncio.Task[None]] = {}

    def close(self) -> None:
        for task in self._reads.values():
            task.cancel()

    def begin(self, link: Link, schedules: ChildSchedules, pump: Callable[[], None]) -> None:
        """Start reading unless this child's run is under way. ``pump`` is called when more pieces are in memory."""
        if link not in self._reads:
            work = self._read(link, schedules, pump)
            self._reads[link] = spawn(work, f"read ahead for {link.name}")

    async def _read(self, link: Link, schedules: ChildSchedules, pump: Callable[[], None]) -> None:
        node = self._node
        loop = asyncio.get_running_loop()
        try:
            for holding, indices in self._absent(link, schedules):
                try:
                    pieces = await loop.run_in_executor(node.disk, read_pieces, holding, indices)
                except P2PCastError as error:
                    if isinstance(error, IntegrityError) or isinstance(error.__cause__, FileNotFoundError):
                        node.damaged.notify(holding)
                    raise
                for index, payload in zip(indices, pieces, strict=True):
                    node.cache.put(holding.id, index, payload)
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

    def _absent(self, link: Link, schedules: ChildSchedules) -> list[tuple[Holding, range]]:
        """Return runs of pieces that the child needs soon and that are not in memory."""
        runs: list[tuple[Holding, range]] = []
        # Never more than the cache holds together: else the last pieces evict the first, and nothing is ever sent.
        room = min(READ_AHEAD_BYTES, self._node.cache.most_bytes // 2)
        for send in schedules.upcoming(READ_AHEAD_PIECES):
            holding = self._node.holdings.get(send.artifact.id)
            if holding is None:
                # Retention removed the artifact. The child has to fetch it from a different node.
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
    """Read held pieces from the log in one read, and verify each again. Raises IntegrityError."""
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
