"""A siege of daemons: connections that mean no good, some by strangers, some by one who holds the join token. ``python -m netem.siege``, an ``Orders`` as JSON on its input, a tally on its output.

What each kind of connection does is said in ``KINDS``. Frames are broken at random from the samples in ``netem.malformed``, from a seed; half of an insider's are well-formed and make no sense where they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from netem.malformed import SAMPLES, frames, mutated
from p2pcast.errors import P2PCastError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import HEADER, Connection, Event, Identity
from p2pcast.wire.messages import Type, encode
from p2pcast.wire.state import Side
from p2pcast.wire.token import Token

HELD_S = 12.0
"""For a connection that stays: longer than any daemon should bear it."""
DRIP_S = 0.5
JOINED_S = 1.0
PATIENCE_S = 15.0
"""After which a connection that is neither answered nor closed is given up, and counted."""


@dataclass(frozen=True, slots=True)
class Orders:
    """``daemons`` and ``https``: [host, port] each. ``frames``: in each connection that sends any."""

    daemons: list[tuple[str, int]]
    https: list[tuple[str, int]]
    token: str
    connections: int
    frames: int
    at_once: int
    seed: int


class _Intruder:
    """The owner of a link by one who holds the token; hears nothing."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None: ...
    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...
    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...
    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.closed.set()


class Siege:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._draw = random.Random(orders.seed)
        self._frames = frames()
        self._token = Token.parse(orders.token)
        self.tally: Counter[str] = Counter()

    async def run(self) -> dict[str, int]:
        draw, orders = self._draw, self._orders
        kinds, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
        room = asyncio.Semaphore(orders.at_once)

        async def one(kind: str) -> None:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await KINDS[kind][1](self)
            except TimeoutError:
                self.tally["given up"] += 1
            except (OSError, P2PCastError):
                pass  # shown out, as it should be
            finally:
                self.tally[kind] += 1
                self.tally["connections"] += 1
                room.release()

        async with asyncio.TaskGroup() as group:
            for kind in draw.choices(kinds, weights, k=orders.connections):
                await room.acquire()
                group.create_task(one(kind))
        return dict(self.tally)

    # -- strangers

    async def garbage(self) -> None:
        """Bytes at random."""
        await self._say([self._draw.randbytes(self._draw.randrange(1, 2000)) for _ in range(20)])

    async def before_hello(self) -> None:
        """Broken frames without a handshake."""
        await self._say(self._broken())

    async def broken_hello(self) -> None:
        """A HELLO with a byte or five wrong, and broken frames behind it."""
        await self._say([mutated(self._draw, self._hello(self._token)), *self._broken()])

    async def wrong_token(self) -> None:
        """A handshake without the secret, and on as if it had been let in."""
        hello = self._hello(Token(self._token.run, secrets.token_bytes(len(self._token.secret))))
        proof = encode(Type.PROOF, {"proof": secrets.token_bytes(32)})
        await self._say([hello, HEADER.pack(len(proof), Type.PROOF, 0, 0) + proof, *self._broken()])

    async def oversized(self) -> None:
        """A frame that promises 4 GiB, and as many bytes as are taken."""
        size = self._draw.choice([(1 << 32) - 1, 1 << 31, 1 << 24])
        await self._say([HEADER.pack(size, self._draw.choice(list(Type)), 0, 0), *([bytes(65536)] * 16)])

    async def silent(self) -> None:
        """Nothing at all, for as long as it may."""
        async with self._connected(self._orders.daemons) as (reader, _):
            await self._hang(reader)

    async def slow(self) -> None:
        """A HELLO byte by byte."""
        async with self._connected(self._orders.daemons) as (reader, writer):
            await self._drip(reader, writer, self._hello(self._token))

    # -- by HTTP

    async def broken_http(self) -> None:
        """Requests that are none, or too much."""
        draw = self._draw
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
        await self._say([request], self._orders.https)

    async def slow_http(self) -> None:
        """A request byte by byte."""
        async with self._connected(self._orders.https) as (reader, writer):
            await self._drip(reader, writer, b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"y" * 100)

    # -- with the token

    async def insider_data(self) -> None:
        """A child that sends frames which are broken, or make no sense."""
        await self._inside("data", "child")

    async def insider_control(self) -> None:
        """A peer that does."""
        await self._inside("control", "peer")

    async def joined(self) -> None:
        """A peer that joins in order, at an address where nobody listens, and is gone a second later."""
        sample = next(body for kind, body in SAMPLES if kind is Type.JOIN)
        body = sample | {"name": f"intruder-{self._draw.randrange(1 << 30)}", "listen": ["127.0.0.1", 9], "engine": None}
        owner = _Intruder()
        link = await self._dial(owner, "control", "peer", self._orders.daemons[0])
        link.send(Type.JOIN, body)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOINED_S):
                await owner.closed.wait()
        link.abort()

    # -- how

    def _broken(self) -> list[bytes]:
        draw = self._draw
        found = [mutated(draw, draw.choice(self._frames)) for _ in range(self._orders.frames)]
        self.tally["frames"] += len(found)
        return found

    def _hello(self, token: Token) -> bytes:
        hello = {"purpose": "data", "role": "child", "link": secrets.token_bytes(16), "stripe": 0, "stripes": 1}
        return Connection(Side.DIALER, Identity(secrets.token_bytes(16), "x", token), bytes(32), hello).take_output()

    @contextlib.asynccontextmanager
    async def _connected(self, places: list[tuple[str, int]]) -> Any:
        reader, writer = await asyncio.open_connection(*self._draw.choice(places))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _say(self, parts: list[bytes], places: list[tuple[str, int]] | None = None) -> None:
        """All of it, and hear what the other side says until it closes."""
        async with self._connected(places or self._orders.daemons) as (reader, writer):
            writer.write(b"".join(parts))
            if writer.can_write_eof():
                writer.write_eof()
            while await reader.read(65536):
                pass

    async def _drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        hang = asyncio.ensure_future(self._hang(reader))
        try:
            for at in range(len(data)):
                writer.write(data[at : at + 1])
                await asyncio.wait([hang], timeout=DRIP_S)
                if hang.done():
                    return
        finally:
            hang.cancel()

    async def _hang(self, reader: asyncio.StreamReader) -> None:
        try:
            async with asyncio.timeout(HELD_S):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            self.tally["held for good"] += 1

    async def _dial(self, owner: _Intruder, purpose: str, role: str, place: tuple[str, int]) -> Link:
        identity = Identity(secrets.token_bytes(16), "intruder", self._token)
        return await dial(owner, *place, identity, purpose=purpose, role=role)

    async def _inside(self, purpose: str, role: str) -> None:
        draw, owner = self._draw, _Intruder()
        link = await self._dial(owner, purpose, role, draw.choice(self._orders.daemons))
        try:
            nonsense = [draw.choice(self._frames) for _ in range(self._orders.frames // 2)]
            self.tally["frames"] += len(nonsense)
            said = [*nonsense, *self._broken()[len(nonsense) :]]
            draw.shuffle(said)
            link.stripes[0].write(b"".join(said))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOINED_S):
                    await owner.closed.wait()
        finally:
            link.abort()


KINDS: dict[str, tuple[float, Callable[[Siege], Any]]] = {
    "garbage": (10, Siege.garbage),
    "frames before the handshake": (12, Siege.before_hello),
    "a broken HELLO": (15, Siege.broken_hello),
    "a wrong token": (12, Siege.wrong_token),
    "an oversized frame": (4, Siege.oversized),
    "silence": (3, Siege.silent),
    "a HELLO byte by byte": (3, Siege.slow),
    "broken HTTP": (8, Siege.broken_http),
    "HTTP byte by byte": (3, Siege.slow_http),
    "a child with the token": (17, Siege.insider_data),
    "a peer with the token": (11, Siege.insider_control),
    "joins and is gone": (2, Siege.joined),
}
"""Kind → (how often, what)."""
TALKERS = ("frames before the handshake", "a broken HELLO", "a wrong token", "a child with the token", "a peer with the token")


def orders(
    daemons: list[tuple[str, int]],
    https: list[tuple[str, int]],
    token: str,
    connections: int,
    all_frames: int,
    at_once: int,
    seed: int,
) -> str:
    """For the process's input: about ``all_frames`` in all."""
    talkers = sum(KINDS[kind][0] for kind in TALKERS) / sum(weight for weight, _ in KINDS.values())
    each = max(1, round(all_frames / (connections * talkers)))
    return json.dumps(asdict(Orders(daemons, https, token, connections, each, at_once, seed)))


def main() -> None:
    given = json.load(sys.stdin)
    given |= {name: [(host, port) for host, port in given[name]] for name in ("daemons", "https")}
    print(json.dumps(uvloop.run(Siege(Orders(**given)).run())))


if __name__ == "__main__":
    main()
