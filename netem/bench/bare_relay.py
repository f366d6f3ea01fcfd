"""The least work of any relay, for comparison: a process that reads a piece, hashes and forwards it, and writes it to a
file. It has no protocol, no signatures, one connection (with TLS if p2pcast's have TLS), and no record of forwarded
pieces. The difference to p2pcast's relay is the cost of its promises.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import cast

import blake3
import numpy as np

HIGH_BYTES = 1 << 20
READ_BYTES = 1 << 16


class Counter(asyncio.BufferedProtocol):
    """The sink: reads and discards."""

    def __init__(self, expected: int) -> None:
        self.done = asyncio.Event()
        self._left = expected
        self._buffer = bytearray(READ_BYTES)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            self.done.set()


class Forwarder(asyncio.BufferedProtocol):
    """The process in the middle."""

    def __init__(self, expected: int, piece: int, child: asyncio.Transport, path: Path) -> None:
        self.done = asyncio.Event()
        self._left, self._bytes = expected, piece
        self._child = child
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._at = 0
        self._transport: asyncio.Transport | None = None
        self._fresh()

    def _fresh(self) -> None:
        self._piece = np.empty(self._bytes, np.uint8).data
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._piece[self._filled :]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        self._left -= count
        if self._filled == self._bytes:
            blake3.blake3(self._piece).digest()
            self._child.write(self._piece)
            os.pwrite(self._file, self._piece, self._at)
            self._at += self._bytes
            self._fresh()
            if self._child.get_write_buffer_size() > HIGH_BYTES and self._transport is not None:
                self._transport.pause_reading()
                asyncio.get_running_loop().call_later(0.001, self._transport.resume_reading)
        if self._left <= 0:
            os.close(self._file)
            self.done.set()


async def send(port: int, payload_bytes: int, rate_bps: float, tls: ssl.SSLContext | None) -> None:
    """The source, at its rate."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    loop = asyncio.get_running_loop()
    began, sent, chunk = loop.time(), 0, os.urandom(1 << 20)
    while sent < payload_bytes:
        writer.write(chunk)
        await writer.drain()
        sent += len(chunk)
        await asyncio.sleep(max(0.0, began + 8 * sent / rate_bps - loop.time()))
    writer.close()
    await writer.wait_closed()
