"""Attacks on the HTTP endpoints."""

from __future__ import annotations

from netem.chaos.siege.siege import Siege


async def broken(siege: Siege) -> None:
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


async def slow(siege: Siege) -> None:
    """Send a request byte by byte."""
    async with siege.connection(siege.draw.choice(siege.settings.https)) as (reader, writer):
        await siege.send_slowly(reader, writer, b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"y" * 100)
