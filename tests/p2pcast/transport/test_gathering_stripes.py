"""The rest of a piece takes one wakeup, and the wait for it is bounded."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from p2pcast.transport.stripe import GATHER_LEAST_BYTES, RECORD_BYTES, Stripe


class Piece:
    """A connection in the middle of a piece."""

    def __init__(self, size: int) -> None:
        self.missing_bytes = size
        self.payload_bytes = 0
        self.fault = None
        self.more = asyncio.Event()
        self._buffer = bytearray(1 << 20)

    def get_buffer(self) -> memoryview:
        return memoryview(self._buffer)

    def received(self, count: int) -> list[Any]:
        self.missing_bytes -= count
        self.payload_bytes += count
        self.more.set()
        return []

    def take_output(self) -> bytes:
        return b""

    def release(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def on_closed(self, stripe: Stripe, error: Exception | None) -> None:
        self.closed.set()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Pair:
    def __init__(self, stripe: Stripe, piece: Piece, owner: Owner, sender: socket.socket) -> None:
        self.stripe, self.piece, self.owner, self.sender = stripe, piece, owner, sender

    async def send(self, size: int) -> None:
        """Send over loopback, where the bytes have arrived when the call returns, and let the loop run."""
        self.sender.sendall(bytes(size))
        for _ in range(20):
            await asyncio.sleep(0)

    async def until(self, got: int) -> None:
        while self.piece.payload_bytes < got:
            self.piece.more.clear()
            await self.piece.more.wait()


SIZE = 40_000


@pytest.fixture
async def pair() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        piece, owner = Piece(SIZE), Owner()
        _, stripe = await asyncio.get_running_loop().create_connection(
            lambda: Stripe(piece, owner), *server.getsockname()
        )  # type: ignore[arg-type]
        sender, _ = server.accept()
        with sender:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stripe.gather(True)
            yield Pair(stripe, piece, owner, sender)
            stripe.abort()
            await owner.closed.wait()


async def test_the_rest_of_a_piece_is_read_in_one_wakeup(pair: Pair) -> None:
    await pair.send(100)
    await pair.until(100)
    for _ in range(3):
        await pair.send(10_000)
        assert pair.piece.payload_bytes == 100
    await pair.send(SIZE - 30_100)
    await pair.until(SIZE)
    # Between pieces any byte counts again.
    pair.piece.missing_bytes = 0
    await pair.send(1)
    await pair.until(SIZE + 1)


async def test_a_slow_piece_is_read_on_arrival(pair: Pair) -> None:
    await pair.send(100)
    await pair.until(100)
    await pair.send(10_000)
    pair.stripe.gather(True)
    assert pair.piece.payload_bytes == 100
    # No bytes have arrived since the last time: the buffered bytes are taken.
    pair.stripe.gather(True)
    await pair.until(10_100)
    pair.stripe.gather(False)
    await pair.send(1)
    await pair.until(10_101)


async def test_a_closed_connection_is_noticed_at_once(pair: Pair) -> None:
    await pair.send(100)
    await pair.until(100)
    pair.sender.close()
    await pair.owner.closed.wait()


async def test_a_small_remainder_is_read_on_arrival(pair: Pair) -> None:
    await pair.send(SIZE - GATHER_LEAST_BYTES + 1)
    await pair.until(SIZE - GATHER_LEAST_BYTES + 1)
    await pair.send(1)
    await pair.until(SIZE - GATHER_LEAST_BYTES + 2)


async def test_with_tls_a_partly_read_record_is_accounted_for(pair: Pair) -> None:
    """A partly read record is in this process, so the kernel must wait for fewer bytes."""
    pair.stripe._opaque = RECORD_BYTES
    await pair.send(100)
    await pair.until(100)
    await pair.send(SIZE - 100 - RECORD_BYTES)
    await pair.until(SIZE - RECORD_BYTES)
