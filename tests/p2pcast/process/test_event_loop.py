"""Sockets given to the loop have one owner, however early their connection ends."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import subprocess
import sys

import pytest

from p2pcast.process import event_loop

RESET_AT_ONCE = struct.pack("ii", 1, 0)


def reset_connection() -> socket.socket:
    """A socket after a reset of the connection by the other side."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
    theirs.close()
    ours.setblocking(False)
    return ours


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")  # type: ignore[attr-defined]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_a_connection_that_ends_before_its_start_keeps_no_descriptor(tls):
    """A kept descriptor would be closed at garbage collection, when its number may belong to another file."""

    async def work() -> None:
        sock = reset_connection()
        options = {"ssl": ssl.create_default_context(), "server_hostname": "localhost"} if tls else {}
        try:
            await asyncio.get_running_loop().create_connection(Greeter, sock=sock, **options)
        except OSError:
            assert tls
        assert sock.fileno() == -1

    event_loop.run(work())


def test_the_socket_of_a_connection_that_is_up_is_the_loop_s():
    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            ours = socket.create_connection(listening.getsockname())
            theirs, _ = listening.accept()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            assert ours.fileno() == -1
            theirs.sendall(b"word\n")
            assert await reader.readline() == b"word\n"
            writer.close()
            await writer.wait_closed()
            assert theirs.recv(1) == b""

    event_loop.run(work())


def test_garbage_is_collected_rarely_at_a_start_and_as_usual_in_a_loop_and_after_a_command():
    code = """
import gc
usual = gc.get_threshold()
from p2pcast import cli
from p2pcast.process import event_loop, garbage_collection

async def look():
    return gc.get_threshold()

cli.cli = lambda **_: print(gc.get_threshold()[0] == garbage_collection.STARTING, event_loop.run(look()) == usual)
cli.main()
cli.cli = lambda **_: print(gc.get_threshold()[0] == garbage_collection.STARTING)
cli.main()
print(gc.get_threshold() == usual)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "True"]


def test_a_connection_that_fails_and_is_cancelled_is_cancelled():
    async def work() -> None:
        reading, writing = (os.fdopen(number, mode, 0) for number, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        connecting = asyncio.create_task(asyncio.get_running_loop().connect_read_pipe(lambda: 1 / 0, reading))
        await asyncio.sleep(0)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert connecting.cancelled()
        reading.close()
        writing.close()

    event_loop.run(work())


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("end", ["read", "write"])
def test_a_pipe_whose_connection_is_cancelled_is_closed(end: str, turns: int):
    """Collected while open, the pipe would close its number again."""
    reading, writing = (os.fdopen(number, mode, 0) for number, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
    mine, other = (reading, writing) if end == "read" else (writing, reading)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.connect_read_pipe if end == "read" else loop.connect_write_pipe
        connecting = asyncio.create_task(connect(asyncio.Protocol, mine))
        for _ in range(turns):
            await asyncio.sleep(0)
        began = turns > 0
        connecting.cancel()
        await asyncio.wait([connecting])
        if not began:
            mine.close()
        elif not connecting.cancelled():
            connecting.result()[0].close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    event_loop.run(work())
    other.close()
    assert mine.closed
