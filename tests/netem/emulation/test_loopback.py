"""The network on loopback: forwarded, delayed and cut traffic, between a dialler and an echo server that use the wire's
HELLO.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import msgpack
import pytest

from netem.emulation.loopback import PAYLOAD_BYTES, Net

PAYLOAD = bytes(range(256)) * (PAYLOAD_BYTES // 128)


def hello(name: str, purpose: str) -> bytes:
    body = msgpack.packb({"name": name, "purpose": purpose})
    return struct.pack("<IHHI", len(body), 1, 0, 0) + body


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net(1e9)
    yield net
    await net.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
    except ConnectionError:
        pass
    finally:
        writer.close()


class Talk:
    """A dialler's connection to the echo server behind the network."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def said_back(self, words: bytes) -> None:
        self.writer.write(words)
        async with asyncio.timeout(600):
            assert await self.reader.readexactly(len(words)) == words


@pytest.fixture
async def talk(net):
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = await net.front("b", server.sockets[0].getsockname()[1])
    made: list[Talk] = []

    async def dial(name: str, purpose: str = "data") -> Talk:
        made.append(Talk(*await asyncio.open_connection("127.0.0.1", port)))
        await made[-1].said_back(hello(name, purpose))
        return made[-1]

    yield dial
    for each in made:
        each.writer.close()
    server.close()


async def test_payload_is_counted_for_its_receiver(net, talk):
    await (await talk("a")).said_back(PAYLOAD)
    await net.received("a", len(PAYLOAD))
    await net.received("b", len(PAYLOAD))
    await (await talk("c", "control")).said_back(PAYLOAD)
    assert net.flows["c"].bytes == 0
    net.reset()
    assert net.flows["a"].bytes == 0


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a"), ("*", "a"), ("b", "*")])
async def test_a_cut_way_holds_back_and_closes_nothing(net, talk, way):
    mine, others = await talk("a"), await talk("c")
    net.cut(way)
    mine.writer.write(b"held back")
    if way != ("b", "*"):
        await others.said_back(b"passes")
    reading = asyncio.ensure_future(mine.reader.readexactly(9))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    net.restore()
    async with asyncio.timeout(600):
        assert await reading == b"held back"


async def test_hanging_up_ends_a_hosts_connections_and_no_others(net, talk):
    mine, others = await talk("a"), await talk("c")
    await net.hang_up("a")
    async with asyncio.timeout(600):
        with pytest.raises(OSError, match="reset"):
            await mine.reader.readexactly(1)
    await others.said_back(b"passes")
    await (await talk("a")).said_back(b"back again")


async def test_encrypted_links_pass_unchanged(net):
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = await net.front("b", server.sockets[0].getsockname()[1])
    net.identify = lambda _port, _to: "a"
    said = Talk(*await asyncio.open_connection("127.0.0.1", port))
    await said.said_back(PAYLOAD)
    assert net.flows["b"].bytes >= len(PAYLOAD)
    net.identify = lambda _port, _to: None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    said.writer.close()
    writer.close()
    server.close()
