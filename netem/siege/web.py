"""What is done by HTTP."""

from __future__ import annotations

from netem.siege.assault import Assault


async def broken(siege: Assault) -> None:
    """Requests that are none, or too much."""
    draw = siege.draw
    request = draw.choice(
        [
            draw.randbytes(3000),
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + bytes(200_000),
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n" + bytes(70_000),
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n" + draw.randbytes(9),
            b"GET /wait?version=" + draw.randbytes(20).hex().encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /commit HTTP/1.1\r\nHost: localhost\r\nOrigin: http://elsewhere\r\nContent-Length: 2\r\n\r\n{}",
        ]
    )
    await siege.say([request], draw.choice(siege.orders.https))


async def slow(siege: Assault) -> None:
    """A request byte by byte."""
    async with siege.connected(siege.draw.choice(siege.orders.https)) as (reader, writer):
        await siege.drip(reader, writer, b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"y" * 100)
