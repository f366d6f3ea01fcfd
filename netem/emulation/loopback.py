"""A network on loopback: a proxy in front of every process, which forwards bytes at a given rate and holds them back on
request.

Promises: no privileges are needed. The proxy reads the sender from each connection's HELLO, or asks ``identify`` for
encrypted links. (Control connections then share the rate, as they cannot be told from data.) The rate applies to all
traffic from one host to another, over any number of connections. On a cut path no byte passes and no connection closes;
held bytes are delivered after the repair, as with TCP. A cut thus emulates a frozen host or a half-open connection, and
in one direction an asymmetric partition. Delay and loss are not modelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack

from p2pcast.ground.wakeup import Wakeup

CHUNK_BYTES = 16 * 1024
"""Read and forwarded at once: a quarter of a delta's piece, so that a cut falls between pieces or within one."""
KERNEL_BYTES = 32 * 1024
"""Requested socket buffers of a path, so that few bytes lie between two hosts."""
SEGMENT_BYTES = 1448
"""As on an Ethernet."""
PAYLOAD_BYTES = 4 * 1024
"""A smaller read counts as control messages."""
HEADER_BYTES = 12
MOST_HELLO_BYTES = 4096

Way = tuple[str, str]
"""(sender, receiver), by name."""


@dataclass(slots=True)
class ReceivedFlow:
    """Bytes received by one host over data links since the last ``reset``."""

    bytes: int = 0
    times: list[float] = field(default_factory=list)
    """Times of forwarded payload, by the loop's clock."""


class Bucket:
    """A rate limit with one chunk of burst."""

    def __init__(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Return when ``size`` bytes have left the wire."""
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + size / self.rate_bytes_s
        await asyncio.sleep(self._free_at - loop.time())


class Net:
    """``rate_bytes_s``: of every path without its own rate in ``rates``. ``identify``: returns the dialling host of an
    encrypted link from the ports (from, to) of the incoming connection; None for an unknown process.
    """

    def __init__(self, rate_bytes_s: float, identify: Callable[[int, int], str | None] | None = None) -> None:
        self.identify = identify
        self.flows: defaultdict[str, ReceivedFlow] = defaultdict(ReceivedFlow)
        self.rates: dict[Way, float] = {}
        self.rate_bytes_s = rate_bytes_s
        self.slow: dict[str, float] = {}
        """Name → share of its rate that every path to and from it keeps."""
        self._buckets: dict[Way, Bucket] = {}
        self._cuts: set[Way] = set()
        self._changed = Wakeup()
        self._passed = Wakeup()
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], Way] = {}
        """By (dialer, listener)."""

    async def front(self, name: str, port: int) -> int:
        """Put a proxy before ``name``, which listens on loopback at ``port``; returns the proxy's port."""
        listening = socket.create_server(("127.0.0.1", 0))
        _limit_segments(listening)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(name, port, reader, writer)

        self._servers.append(await asyncio.start_server(serve, sock=listening, limit=CHUNK_BYTES))
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        await self._end(list(self._connections))

    # -- faults

    def cut(self, *ways: Way) -> None:
        """Hold back all bytes on these paths; ``*`` stands for every host."""
        self._cuts |= set(ways)
        self._changed.notify()

    def restore(self) -> None:
        """Restore every path."""
        self._cuts.clear()
        self._changed.notify()

    async def hang_up(self, name: str) -> None:
        """Reset every connection of a host; new connections are possible at once."""
        await self._end([task for task, way in self._connections.items() if name in way])

    # -- measurements

    def reset(self) -> None:
        """Restart all counts."""
        self.flows.clear()

    async def received(self, name: str, size: int) -> None:
        """Return as soon as ``size`` bytes have been forwarded to ``name``."""
        while self.flows[name].bytes < size:
            await self._passed.wait()

    # -- forwarding

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(
        self, listener: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        writers = [writer]
        try:
            hello, dialer, data = await _hello(reader) if self.identify is None else self._dialled(writer)
            self._connections[task] = (dialer, listener)
            await self._open(dialer, listener)
            inner, outer = await _dial(port)
            writers.append(outer)
            for each in writers:
                each.transport.set_write_buffer_limits(CHUNK_BYTES)
            outer.write(hello)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(dialer, listener, reader, outer, data))
                group.create_task(self._pass(listener, dialer, inner, writer, data))
        except* (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass
        finally:
            self._connections.pop(task, None)
            for each in writers:
                # Send a reset, as for a dead process: bytes in a closed socket must not be delivered.
                if (sock := each.get_extra_info("socket")) is not None:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.transport.abort()

    def _dialled(self, writer: asyncio.StreamWriter) -> tuple[bytes, str, bool]:
        """As ``_hello``, without reading. Raises EOFError."""
        assert self.identify is not None
        name = self.identify(writer.get_extra_info("peername")[1], writer.get_extra_info("sockname")[1])
        if name is None:
            raise EOFError
        return b"", name, True

    async def _open(self, sender: str, receiver: str) -> None:
        while self._cuts & {(sender, receiver), ("*", receiver), (sender, "*")}:
            await self._changed.wait()

    async def _pass(
        self, sender: str, receiver: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bool
    ) -> None:
        """Raises EOFError at the end, which also ends the other direction."""
        loop, way = asyncio.get_running_loop(), (sender, receiver)
        bucket = self._buckets.setdefault(way, Bucket(self.rate_bytes_s))
        while chunk := await reader.read(CHUNK_BYTES):
            await self._open(sender, receiver)
            share = min(self.slow.get(sender, 1.0), self.slow.get(receiver, 1.0))
            bucket.rate_bytes_s = share * self.rates.get(way, self.rate_bytes_s)
            if data:
                await bucket.take(len(chunk))
                await self._open(sender, receiver)
            if writer.transport.is_closing():
                break
            writer.write(chunk)
            await writer.drain()
            if data and len(chunk) >= PAYLOAD_BYTES:
                flow = self.flows[receiver]
                flow.bytes += len(chunk)
                flow.times.append(loop.time())
                self._passed.notify()
        raise EOFError


def _limit_segments(sock: socket.socket) -> None:
    """Limit the segment size: loopback's segments are so long that a paced sender would send one and pause
    for seconds.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, KERNEL_BYTES)


async def _dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    try:
        sock.setblocking(False)
        _limit_segments(sock)  # before connecting, as the handshake fixes the window
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES)
    except BaseException:
        sock.close()
        raise


async def _hello(reader: asyncio.StreamReader) -> tuple[bytes, str, bool]:
    """The first frame of a connection, its sender, and whether it begins a data link. Raises EOFError, ValueError."""
    header = await reader.readexactly(HEADER_BYTES)
    (size,) = struct.unpack_from("<I", header)
    if size > MOST_HELLO_BYTES:
        raise ValueError("no HELLO")
    body = await reader.readexactly(size)
    hello = msgpack.unpackb(body)
    return header + body, hello["name"], hello["purpose"] == "data"
