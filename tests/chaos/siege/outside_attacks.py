"""Attacks by strangers: before the TLS handshake has finished or in place of it, and on the HTTP endpoints."""

from __future__ import annotations

import asyncio
import ssl

from p2pcast.trust.tls_contexts import first_contact
from tests.chaos.siege.siege import DRIP_S, Siege

SOME_BYTES = 100


async def garbage(siege: Siege) -> None:
    """Send random bytes."""
    await siege.send_all([siege.draw.randbytes(siege.draw.randrange(1, 2000)) for _ in range(20)])


async def frames(siege: Siege) -> None:
    """Send broken frames without a handshake."""
    await siege.send_all(siege.broken())


async def silent(siege: Siege) -> None:
    """Send nothing for as long as the daemon keeps the connection open."""
    async with siege.connection() as (reader, _):
        await siege.wait_until_closed(reader)


async def half_client_hello(siege: Siege) -> None:
    """Send half of a ClientHello, and nothing more."""
    async with siege.connection() as (reader, writer):
        writer.write(siege.client_hello[: siege.draw.randrange(1, len(siege.client_hello))])
        await siege.wait_until_closed(reader)


async def slow_client_hello(siege: Siege) -> None:
    """Send a ClientHello byte by byte."""
    async with siege.connection() as (reader, writer):
        await siege.send_slowly(reader, writer, siege.client_hello)


async def client_hello_alone(siege: Siege) -> None:
    """Send a whole ClientHello, and do not answer the reply."""
    async with siege.connection() as (reader, writer):
        writer.write(siege.client_hello)
        await siege.wait_until_closed(reader)


async def client_hello_and_gone(siege: Siege) -> None:
    """Send a prepared ClientHello, which costs the sender nothing, and disconnect as soon as it is answered."""
    async with siege.connection() as (reader, writer):
        writer.write(siege.client_hello)
        await reader.read(1)


async def broken_client_hello(siege: Siege) -> None:
    """Send a ClientHello with some wrong bytes, followed by random bytes."""
    await siege.send_all([siege.mutated(siege.client_hello), siege.draw.randbytes(200)])


async def old_tls(siege: Siege) -> None:
    """Offer TLS 1.2."""
    context = first_contact()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    await siege.send_all([b"?"], tls=context)


async def forged(siege: Siege) -> None:
    """Present a peer certificate of a self-made authority, then send a HELLO and broken frames."""
    await siege.send_all([siege.hello(), *siege.broken(20)], tls=siege.forged())


async def stalled_answer(siege: Siege) -> None:
    """Finish the TLS handshake, then send nothing."""
    async with siege.connection(siege.hub, first_contact()) as (reader, _):
        await siege.wait_until_closed(reader)


async def slow_answer(siege: Siege) -> None:
    """Send a ClientHello and the rest of the handshake a few bytes at a time."""
    context, outgoing, incoming = first_contact(), ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    async with siege.connection() as (reader, writer):
        while True:
            try:
                tls.do_handshake()
            except ssl.SSLWantReadError:
                await _slowly(writer, outgoing.read())
                if not (found := await reader.read(1 << 16)):
                    return
                incoming.write(found)
                continue
            await _slowly(writer, outgoing.read())
            await siege.wait_until_closed(reader)
            return


async def _slowly(writer: asyncio.StreamWriter, data: bytes) -> None:
    for at in range(0, len(data), SOME_BYTES):
        if writer.transport.is_closing():
            return
        writer.write(data[at : at + SOME_BYTES])
        await asyncio.sleep(DRIP_S)


# -- HTTP


async def broken_http(siege: Siege) -> None:
    """Send malformed or oversized requests."""
    draw = siege.draw
    request = draw.choice(
        [
            draw.randbytes(3000),
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + bytes(200_000),
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n"
            + bytes(70_000),
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n" + draw.randbytes(9),
            b"GET /wait?version=" + draw.randbytes(20).hex().encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nOrigin: http://elsewhere\r\nContent-Length: 2\r\n\r\n{}",
        ]
    )
    await siege.send_all([request], draw.choice(siege.settings.https))


async def slow_http(siege: Siege) -> None:
    """Send a request byte by byte."""
    async with siege.connection(siege.draw.choice(siege.settings.https)) as (reader, writer):
        await siege.send_slowly(reader, writer, b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"y" * 100)
