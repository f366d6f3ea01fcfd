"""How a siege goes about it: so many connections at a time, from many addresses, each of a kind that is drawn; and what all kinds do in the same way.

Promises: the same seed gives the same kinds in the same order, and the same frames; a connection that is neither answered nor closed is given up, and counted; nothing is awaited without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from netem.malformed import frames, mutated
from netem.siege.orders import Orders, Place
from netem.siege.records import greeting
from p2pcast.errors import P2PCastError
from p2pcast.transport.dial import dial
from p2pcast.transport.enrol import enrol
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.trust.authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.contexts import Tls, first_contact
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.roles import Certified
from p2pcast.wire.connection import Connection, Identity
from p2pcast.wire.state import Side
from p2pcast.wire.token import Token

HELD_S = 12.0
"""For a connection that stays: longer than any daemon should bear it."""
DRIP_S = 0.5
JOINED_S = 1.0
PATIENCE_S = 15.0
"""After which a connection that is neither answered nor closed is given up, and counted."""
ADDRESSES = [f"127.66.{n}.1" for n in range(1, 33)]
"""Where connections come from: not from where honest peers live, and not all from one place."""
THIEVES = 4
"""Certificates that were stolen."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Intruder(QuietOwner):
    """The owner of a link by one who has got in; hears nothing."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.closed.set()


Act = Callable[["Assault"], Awaitable[None]]


class Assault:
    """``kinds``: name → (how often, what)."""

    def __init__(self, orders: Orders, kinds: Mapping[str, tuple[float, Act]]) -> None:
        self.orders = orders
        self.draw = random.Random(orders.seed)
        self.token = Token.parse(orders.token)
        self.tally: Counter[str] = Counter()
        self._kinds = kinds
        self._frames = frames()
        self._stolen: list[Credentials] = []
        self._contexts: list[Tls] = []
        self.greeting = greeting(first_contact())

    async def run(self) -> dict[str, int]:
        orders, room = self.orders, asyncio.Semaphore(self.orders.at_once)
        if orders.tls:
            await self._steal()
        began = time.process_time()
        names = list(self._kinds)

        async def one(kind: str) -> None:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._kinds[kind][1](self)
            except TimeoutError:
                self.tally["given up"] += 1
                self.tally[f"given up: {kind}"] += 1
            except (OSError, EOFError, P2PCastError):
                pass  # shown out, as it should be
            finally:
                self.tally[kind] += 1
                self.tally["connections"] += 1
                room.release()

        async with asyncio.TaskGroup() as group:
            for kind in self.draw.choices(names, [self._kinds[name][0] for name in names], k=orders.connections):
                await room.acquire()
                group.create_task(one(kind))
        self.tally["cpu_ms"] = round(1000 * (time.process_time() - began))
        return dict(self.tally)

    async def _steal(self) -> None:
        """Peers' certificates, bought with the token before the siege begins."""
        for n in range(THIEVES):
            bought = await enrol(
                *self.orders.daemons[0], self.token, secrets.token_bytes(16), f"stolen-{n}", "peer", new_key(), timeout_s=30.0
            )
            self._stolen.append(bought)
            self._contexts.append(Tls(bought))

    # -- who one is

    def stolen(self) -> tuple[Identity, ssl.SSLContext | None]:
        """Whoever it was stolen from, as far as anybody can tell; without TLS anybody who has the token."""
        if not self.orders.tls:
            return Identity(secrets.token_bytes(16), "intruder", self.token), None
        which = self.draw.randrange(THIEVES)
        return Identity(self._stolen[which].who.node, f"stolen-{which}", self.token), self._contexts[which].client

    def thief_context(self) -> tuple[bytes, ssl.SSLContext]:
        """A stolen node, and a context for one connection of it."""
        found = self.draw.choice(self._stolen)
        return found.who.node, Tls(found).client

    def forged(self) -> ssl.SSLContext:
        """With a peer's certificate, of an authority of one's own."""
        now, key = time.time(), new_key()
        authority = Authority.create(self.token.run, now)
        who = Certified(self.token.run, secrets.token_bytes(16), "peer")
        context = first_contact()
        own = Tls(Credentials(key, authority.issue(key.public_key(), who, now, 3600.0), authority.certificate, now)).client
        own.verify_mode = context.verify_mode
        return own

    # -- what one says

    def broken(self, count: int | None = None) -> list[bytes]:
        """Frames, each of them broken."""
        found = [mutated(self.draw, self.draw.choice(self._frames)) for _ in range(count or self.orders.frames)]
        self.tally["frames"] += len(found)
        return found

    def senseless(self, count: int) -> list[bytes]:
        """Well-formed, where nobody has asked for them."""
        self.tally["frames"] += count
        return [self.draw.choice(self._frames) for _ in range(count)]

    def hello(
        self, token: Token | None = None, *, node: bytes | None = None, purpose: str = "data", role: str = "child"
    ) -> bytes:
        said = {"purpose": purpose, "role": role, "link": secrets.token_bytes(16), "stripe": 0, "stripes": 1}
        who = Identity(node or secrets.token_bytes(16), "x", token or self.token)
        return Connection(Side.DIALER, who, bytes(32), said).take_output()

    # -- how it is said

    def somebody(self) -> Place:
        return self.draw.choice(self.orders.daemons)

    @property
    def hub(self) -> Place:
        return self.orders.daemons[0]

    @contextlib.asynccontextmanager
    async def connected(self, place: Place | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Streams]:
        """To a daemon (any), behind TLS if there is a context for it."""
        where = place or self.somebody()
        name = where[0] if tls is not None else None
        reader, writer = await asyncio.open_connection(
            *where, ssl=tls, server_hostname=name, local_addr=(self.draw.choice(ADDRESSES), 0)
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def say(self, parts: Sequence[bytes], place: Place | None = None, tls: ssl.SSLContext | None = None) -> None:
        """All of it, and hear what the other side says until it closes."""
        async with self.connected(place, tls) as (reader, writer):
            writer.write(b"".join(parts))
            await self.heard(reader, writer)

    async def heard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say no more, and listen until the other side closes."""
        if writer.can_write_eof():
            writer.write_eof()
            while await reader.read(65536):
                pass
        else:
            # TLS closes both ways at once: what was written goes first.
            writer.close()
            await writer.wait_closed()

    async def drip(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Byte by byte."""
        hang = asyncio.ensure_future(self.hang(reader))
        try:
            for at in range(len(data)):
                if writer.transport.is_closing():
                    return
                writer.write(data[at : at + 1])
                await asyncio.wait([hang], timeout=DRIP_S)
                if hang.done():
                    return
        finally:
            hang.cancel()

    async def hang(self, reader: asyncio.StreamReader) -> None:
        """Say nothing more, until the other side closes."""
        try:
            async with asyncio.timeout(HELD_S):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            self.tally["held for good"] += 1
        except OSError:
            pass  # shown out

    async def enter(self, owner: Intruder, purpose: str, role: str, place: Place) -> Link:
        """A link, by the way in that honest peers take."""
        identity, context = self.stolen()
        return await dial(owner, *place, identity, purpose=purpose, role=role, tls=context)
