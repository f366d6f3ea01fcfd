"""What is done at the door, by who has no certificate: before TLS is up, and in place of it."""

from __future__ import annotations

import asyncio
import ssl

from netem.malformed import mutated
from netem.siege.assault import DRIP_S, Assault
from p2pcast.trust.contexts import first_contact

SOME_BYTES = 100


async def garbage(siege: Assault) -> None:
    """Bytes at random."""
    await siege.say([siege.draw.randbytes(siege.draw.randrange(1, 2000)) for _ in range(20)])


async def frames(siege: Assault) -> None:
    """Broken frames without a handshake."""
    await siege.say(siege.broken())


async def silent(siege: Assault) -> None:
    """Nothing at all, for as long as it may."""
    async with siege.connected() as (reader, _):
        await siege.hang(reader)


async def half_greeting(siege: Assault) -> None:
    """Half of a ClientHello, and nothing more."""
    async with siege.connected() as (reader, writer):
        writer.write(siege.greeting[: siege.draw.randrange(1, len(siege.greeting))])
        await siege.hang(reader)


async def slow_greeting(siege: Assault) -> None:
    """A ClientHello byte by byte."""
    async with siege.connected() as (reader, writer):
        await siege.drip(reader, writer, siege.greeting)


async def greeting_alone(siege: Assault) -> None:
    """A whole ClientHello, and no answer to what comes back."""
    async with siege.connected() as (reader, writer):
        writer.write(siege.greeting)
        await siege.hang(reader)


async def greeting_and_gone(siege: Assault) -> None:
    """A ClientHello that costs its sender nothing, from one who is gone as soon as it is answered."""
    async with siege.connected() as (reader, writer):
        writer.write(siege.greeting)
        await reader.read(1)


async def broken_greeting(siege: Assault) -> None:
    """A ClientHello with some bytes wrong, and bytes at random behind it."""
    await siege.say([mutated(siege.draw, siege.greeting), siege.draw.randbytes(200)])


async def old_tls(siege: Assault) -> None:
    """TLS 1.2."""
    context = first_contact()
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    await siege.say([b"?"], tls=context)


async def forged(siege: Assault) -> None:
    """A peer's certificate of an authority of one's own, and a HELLO with broken frames behind it."""
    await siege.say([siege.hello(), *siege.broken(20)], tls=siege.forged())


async def stalled_answer(siege: Assault) -> None:
    """TLS up, and then nothing."""
    async with siege.connected(siege.hub, first_contact()) as (reader, _):
        await siege.hang(reader)


async def slow_answer(siege: Assault) -> None:
    """A ClientHello, and what comes behind it, a few bytes at a time."""
    context, outgoing, incoming = first_contact(), ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    async with siege.connected() as (reader, writer):
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
            await siege.hang(reader)
            return


async def _slowly(writer: asyncio.StreamWriter, data: bytes) -> None:
    for at in range(0, len(data), SOME_BYTES):
        if writer.transport.is_closing():
            return
        writer.write(data[at : at + SOME_BYTES])
        await asyncio.sleep(DRIP_S)
