"""Runs a siege: a limited number of connections at a time, from many addresses, each of a randomly drawn kind. Also
holds the steps that all kinds share.

Promises: the same seed gives the same kinds in the same order, and the same frames. A connection that the daemon
neither answers nor closes is abandoned and counted. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from p2pcast.ground.errors import P2PCastError
from p2pcast.transport.dial import dial
from p2pcast.transport.enrolment import enrol
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls, first_contact
from p2pcast.wire.connection import Connection, ConnectionRequest, Identity
from p2pcast.wire.connection_state import Side
from tests.chaos.siege.tls_records import client_hello
from tests.fuzz.mutate import mutated
from tests.fuzz.wire_frames import frames

HELD_S = 60.0
"""Longer than any daemon keeps an idle connection of an attacker, also on a machine that stands still for a while."""
DRIP_S = 0.5
JOINED_S = 1.0
ABANDON_S = 90.0
"""Deadline of a connection that is neither answered nor closed; such connections are counted."""
ADDRESSES = [f"127.66.{n}.1" for n in range(1, 33)]
"""Source addresses: apart from those of honest peers, and several of them."""
STOLEN = 4
"""Number of stolen certificates."""

Place = tuple[str, int]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class SiegeSettings:
    """``daemons`` (the hub first) and ``https``: addresses of their ports. ``frames``: sent in each connection that
    sends frames. ``tls``: whether the daemons' links are encrypted.
    """

    daemons: list[Place]
    https: list[Place]
    token: str
    connections: int
    frames: int
    at_once: int
    seed: int
    tls: bool

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        given = json.loads(text)
        return cls(**given | {name: [(host, port) for host, port in given[name]] for name in ("daemons", "https")})


class Intruder(QuietOwner):
    """Owner of an attacker's link; ignores all events."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.closed.set()


Attack = Callable[["Siege"], Awaitable[None]]


class Siege:
    """``kinds``: name → (weight, attack)."""

    def __init__(self, settings: SiegeSettings, kinds: Mapping[str, tuple[float, Attack]]) -> None:
        self.settings = settings
        self.draw = random.Random(settings.seed)
        self.token = JoinToken.parse(settings.token)
        self.tally: Counter[str] = Counter()
        self._kinds = kinds
        self._frames = frames()
        self._stolen: list[Credentials] = []
        self._contexts: list[Tls] = []
        self.client_hello = client_hello(first_contact())

    async def run(self) -> dict[str, int]:
        settings, room = self.settings, asyncio.Semaphore(self.settings.at_once)
        if settings.tls:
            await self._enrol_stolen()
        began = time.process_time()
        names = list(self._kinds)

        async def one(kind: str) -> None:
            try:
                async with asyncio.timeout(ABANDON_S):
                    await self._kinds[kind][1](self)
            except TimeoutError:
                self.tally["given up"] += 1
                self.tally[f"given up: {kind}"] += 1
            except (OSError, EOFError, P2PCastError):
                pass  # refused, as expected
            finally:
                self.tally[kind] += 1
                self.tally["connections"] += 1
                room.release()

        async with asyncio.TaskGroup() as group:
            for kind in self.draw.choices(names, [self._kinds[name][0] for name in names], k=settings.connections):
                await room.acquire()
                group.create_task(one(kind))
        self.tally["cpu_ms"] = round(1000 * (time.process_time() - began))
        return dict(self.tally)

    async def _enrol_stolen(self) -> None:
        """Enrol peer certificates with the token before the siege begins; they stand for stolen ones."""
        for n in range(STOLEN):
            bought = await enrol(
                *self.settings.daemons[0],
                self.token,
                secrets.token_bytes(16),
                f"stolen-{n}",
                "peer",
                new_key(),
                timeout_s=30.0,
            )
            self._stolen.append(bought)
            self._contexts.append(Tls(bought))

    # -- identities

    def stolen(self) -> tuple[Identity, ssl.SSLContext | None]:
        """The identity of a stolen certificate; without TLS, a new identity with the token."""
        if not self.settings.tls:
            return Identity(secrets.token_bytes(16), "intruder", self.token), None
        which = self.draw.randrange(STOLEN)
        return Identity(self._stolen[which].who.node, f"stolen-{which}", self.token), self._contexts[which].client

    def stolen_context(self) -> tuple[bytes, ssl.SSLContext]:
        """A stolen node id, and a TLS context for one connection in its name."""
        found = self.draw.choice(self._stolen)
        return found.who.node, Tls(found).client

    def forged(self) -> ssl.SSLContext:
        """A TLS context with a peer certificate of a self-made authority."""
        now, key = time.time(), new_key()
        authority = Authority.create(self.token.run, now)
        who = Certified(self.token.run, secrets.token_bytes(16), "peer")
        context = first_contact()
        own = Tls(
            Credentials(key, authority.issue(key.public_key(), who, now, 3600.0), authority.certificate, now)
        ).client
        own.verify_mode = context.verify_mode
        return own

    # -- frames

    def broken(self, count: int | None = None) -> list[bytes]:
        """Frames, each with a change that breaks it."""
        found = [self.mutated(self.draw.choice(self._frames)) for _ in range(count or self.settings.frames)]
        self.tally["frames"] += len(found)
        return found

    def mutated(self, data: bytes) -> bytes:
        return mutated(data, self._frames, self.draw)

    def out_of_place(self, count: int) -> list[bytes]:
        """Well-formed frames that no daemon has asked for."""
        self.tally["frames"] += count
        return [self.draw.choice(self._frames) for _ in range(count)]

    def hello(
        self, token: JoinToken | None = None, *, node: bytes | None = None, purpose: str = "data", role: str = "child"
    ) -> bytes:
        request = ConnectionRequest(purpose, role, secrets.token_bytes(16), stripe=0, stripes=1)
        who = Identity(node or secrets.token_bytes(16), "x", token or self.token)
        return Connection(Side.DIALER, who, bytes(32), request).take_output()

    # -- connections

    def any_daemon(self) -> Place:
        return self.draw.choice(self.settings.daemons)

    @property
    def hub(self) -> Place:
        return self.settings.daemons[0]

    @contextlib.asynccontextmanager
    async def connection(self, place: Place | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Streams]:
        """A connection to a daemon (a random one by default), behind TLS if ``tls`` is given."""
        where = place or self.any_daemon()
        name = where[0] if tls is not None else None
        reader, writer = await asyncio.open_connection(
            *where, ssl=tls, server_hostname=name, local_addr=(self.draw.choice(ADDRESSES), 0)
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send_all(
        self, parts: Sequence[bytes], place: Place | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Send all parts, then read until the daemon closes the connection."""
        async with self.connection(place, tls) as (reader, writer):
            writer.write(b"".join(parts))
            await self.read_to_end(reader, writer)

    async def read_to_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send no more, and read until the daemon closes the connection."""
        if writer.can_write_eof():
            writer.write_eof()
            while await reader.read(65536):
                pass
        else:
            # TLS closes both directions at once, so flush the written bytes first.
            writer.close()
            await writer.wait_closed()

    async def send_slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send ``data`` byte by byte."""
        wait_until_closed = asyncio.ensure_future(self.wait_until_closed(reader))
        try:
            for at in range(len(data)):
                if writer.transport.is_closing():
                    return
                writer.write(data[at : at + 1])
                await asyncio.wait([wait_until_closed], timeout=DRIP_S)
                if wait_until_closed.done():
                    return
        finally:
            wait_until_closed.cancel()

    async def wait_until_closed(self, reader: asyncio.StreamReader) -> None:
        """Send nothing more, and read until the daemon closes the connection."""
        try:
            async with asyncio.timeout(HELD_S):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            self.tally["held for good"] += 1
        except OSError:
            pass  # refused

    async def enter(self, owner: Intruder, purpose: str, role: str, place: Place) -> Link:
        """A link opened as honest peers open theirs."""
        identity, context = self.stolen()
        return await dial(owner, *place, identity, purpose=purpose, role=role, tls=context)
