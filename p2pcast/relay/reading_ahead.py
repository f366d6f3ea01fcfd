"""For children that lag behind memory: what they need next, read from the store.

Promises: of a child's pieces no more are read at once than memory will still hold when all are here; what a disk has spoilt is not passed on, and ends that child's
link alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import blake3

from p2pcast import limits
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RemoteError
from p2pcast.relay.feed import ChildFeeds
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.tasks import spawn
from p2pcast.transport.link import Link

READ_AHEAD_PIECES = 32
"""Pieces that are read from the store at once for a child that lags behind memory."""
READ_AHEAD_BYTES = 4 * limits.MIB
"""And their bytes: an anchor's pieces are large, and every lagging child has as much in flight."""


class ReadAhead:
    """Into ``node.cache``, by its disk threads; one run for a child at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reads: dict[Link, asyncio.Task[None]] = {}

    def close(self) -> None:
        for task in self._reads.values():
            task.cancel()

    def begin(self, link: Link, feeds: ChildFeeds, pump: Callable[[], None]) -> None:
        """Unless it is under way for this child. ``pump`` sends what is in memory: it is called whenever there is more."""
        if link not in self._reads:
            work = self._read(link, feeds, pump)
            self._reads[link] = spawn(work, f"read ahead for {link.name}")

    async def _read(self, link: Link, feeds: ChildFeeds, pump: Callable[[], None]) -> None:
        node = self._node
        loop = asyncio.get_running_loop()
        try:
            for holding, indices in self._absent(link, feeds):
                pieces = await loop.run_in_executor(node.disk, read_pieces, holding, indices)
                for index, payload in zip(indices, pieces, strict=True):
                    node.cache.put(holding.id, index, payload)
                # At once, while they are in memory: beside other children that read, they may soon be pushed out.
                pump()
        except P2PCastError as error:
            link.close(error)
        except Exception:
            link.close(LocalError("this node failed to read its store; see its log"))
            raise
        finally:
            del self._reads[link]
        pump()

    def _absent(self, link: Link, feeds: ChildFeeds) -> list[tuple[Holding, range]]:
        """Runs of pieces that the child needs soon and that are not in memory."""
        runs: list[tuple[Holding, range]] = []
        # Never more than memory will still hold when all of it is here: else the first are pushed out by the last, and nothing moves.
        room = min(READ_AHEAD_BYTES, self._node.cache.most_bytes // 2)
        for send in feeds.upcoming(READ_AHEAD_PIECES):
            holding = self._node.holdings.get(send.artifact.id)
            if holding is None:
                # Retention was faster: this link can't be served; the child finds another way.
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
    """Held pieces from the log, in one read, each checked again: what a disk has spoilt is not passed on. Raises IntegrityError."""
    assembly, piece = holding.assembly, holding.assembly.open.piece
    data = memoryview(holding.log.read(indices.start * piece, len(indices) * piece, short=True))
    # Asked only after the read: once the artifact is sealed, its file goes on behind the log's last, shorter piece.
    last = assembly.piece_bytes(indices[-1])
    data = data[: (len(indices) - 1) * piece + (piece if last is None else last)]
    pieces = [data[at * piece : (at + 1) * piece] for at in range(len(indices))]
    for index, payload in zip(indices, pieces, strict=True):
        if blake3.blake3(payload).digest() != assembly.piece_hash(index):
            raise IntegrityError(f"piece {index} of {assembly.open.version} is damaged in the store of this node")
    return pieces
