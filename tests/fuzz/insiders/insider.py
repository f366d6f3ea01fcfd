"""One admitted node that attacks daemons: it opens connections of each purpose, sends random messages over them, and
misleads peers that attach to it as a parent.

A message counts as processed when a later PING was answered, or the link was closed because of the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from typing import Any, Final

import msgpack
from insiders.values import Nonsense, World

from p2pcast.ground.errors import P2PCastError
from p2pcast.transport.dial import dial
from p2pcast.transport.enrolment import enrol
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.stripe import Stripe
from p2pcast.trust.certificates import new_key, request
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import Tls
from p2pcast.wire import messages
from p2pcast.wire.connection import HEADER, Event, Identity, Message, Piece
from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState, Side
from p2pcast.wire.messages import RECORDS, SIGNED, Hello, Type, encode

Place = tuple[str, int]

AT_ONCE: Final = 12
"""Messages between two PINGs."""
ANSWER_S: Final = 120.0
"""For the answer to a PING: a link over its ration waits."""
OUT_OF_PLACE: Final = 0.004
"""Share of messages that the state does not allow: each ends its link."""
TO_CHILDREN: Final = 40
"""Messages to a node that has attached here."""

FIRST: Final = {
    ConnectionState.CONTROL: Type.JOIN,
    ConnectionState.DATA: Type.ATTACH,
    ConnectionState.PUBLISH: Type.RANK,
    ConnectionState.ENGINE: Type.MEMBER,
}
PURPOSES: Final = {
    ConnectionState.CONTROL: "control",
    ConnectionState.DATA: "data",
    ConnectionState.PUBLISH: "publish",
    ConnectionState.ENGINE: "engine",
}
ROLES: Final = {
    ConnectionState.CONTROL: "peer",
    ConnectionState.DATA: "child",
    ConnectionState.PUBLISH: "rank",
    ConnectionState.ENGINE: "member",
}
ENDS: Final = {Type.LEAVE, Type.ERROR}
"""Said at the end, if at all."""


def allowed(state: ConnectionState, side: Side) -> list[Type]:
    return [kind for (at, who, kind) in TRANSITIONS if at is state and who is side and kind not in ENDS]


class Heard(QuietOwner):
    """The owner of an insider's link: collects values from received messages, and notes the last answered PING."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.answered = 0
        self.moved = asyncio.Event()

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if isinstance(event, Piece):
            self._keep(self._world.pieces, bytes(event.payload))
        elif isinstance(event, Message):
            if event.type in SIGNED:
                self._keep(self._world.signed.setdefault(event.type, []), event.signed)
            elif isinstance(event.body, messages.Pong):
                self.answered = max(self.answered, event.body.t)
                self.moved.set()
            else:
                if isinstance(event.body, messages.Layout):
                    self._keep(self._world.documents, event.body.document)
                self._world.learn(event.body)

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self.moved.set()

    @staticmethod
    def _keep(kept: list[bytes], found: bytes) -> None:
        if len(found) < 1 << 17:
            kept.append(found)
            del kept[:-64]


class Insider:
    """``world`` is shared by all insiders. ``tally``: numbers of sent and processed messages, by type."""

    def __init__(self, seed: int, token: JoinToken, world: World, tally: Counter[str]) -> None:
        self.draw = random.Random(seed)
        self.nonsense = Nonsense(self.draw, world)
        self._token = token
        self._world = world
        self._tally = tally
        self._tls: Tls | None = None
        self._listener: Listener | None = None
        self.node = self.draw.randbytes(16)
        self.identity = Identity(self.node, f"insider-{seed}", token)

    async def enter(self, hub: Place, role: str) -> None:
        """Buy a certificate. Raises P2PCastError."""
        self._tls = Tls(await enrol(*hub, self._token, self.node, self.identity.name, role, new_key(), timeout_s=60.0))

    async def listen(self) -> None:
        """Listen as a parent."""
        assert self._tls is not None
        self._listener = Listener(_Parent(self), self.identity, self._tls.server)
        await self._listener.start("127.0.0.1", 0)
        self._world.places.append(list(self._listener.address))
        del self._world.places[:-8]

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.stop()

    async def walk(self, state: ConnectionState, place: Place, count: int) -> None:
        """One connection, and about ``count`` messages on it. Raises P2PCastError where it is not let in."""
        owner = Heard(self._world)
        link = await dial(
            owner,
            *place,
            self.identity,
            purpose=PURPOSES[state],
            role=ROLES[state],
            tls=None if self._tls is None else self._tls.client,
            timeout_s=60.0,
        )
        link.rate_limit = None
        try:
            await self._talk(link, owner, state, count)
        finally:
            link.abort()
            await asyncio.sleep(0)  # the transport closes in the loop's next turn

    async def _talk(self, link: Link, owner: Heard, state: ConnectionState, count: int) -> None:
        draw, first = self.draw, FIRST[state]
        kinds = [kind for kind in allowed(state, Side.DIALER) if kind is not first]
        if draw.random() < 0.9:
            self._say(link, first, self._first(first))
        if draw.random() < 0.05:
            # Asks, and reads nothing of what it is answered.
            link.pause_reading("deaf")
        serial, sent = 0, 0
        while sent < count and not link.closed:
            batch = min(count - sent, draw.randint(1, AT_ONCE))
            for _ in range(batch):
                kind = (
                    draw.choice([*Type])
                    if draw.random() < OUT_OF_PLACE
                    else draw.choice([*kinds, *([first] if draw.random() < 0.01 else [])])
                )
                self._say(link, kind)
            sent, serial = sent + batch, serial + 1
            self._say(link, Type.PING, {"t": serial})
            async with asyncio.timeout(ANSWER_S):
                while owner.answered < serial and not link.closed:
                    owner.moved.clear()
                    await owner.moved.wait()
            self._tally["heard"] += batch if owner.answered >= serial else 1
        if draw.random() < 0.3:
            self._say(
                link,
                draw.choice(sorted(ENDS))
                if state in (ConnectionState.CONTROL, ConnectionState.PUBLISH)
                else Type.ERROR,
            )

    def _first(self, kind: Type) -> dict[str, Any] | None:
        """A first message that the hub usually accepts."""
        body = self.nonsense.body(kind, right=True)
        if kind is Type.JOIN:
            where = ["127.0.0.1", 9] if self._listener is None else list(self._listener.address)
            body |= {
                "name": f"n{self.draw.randrange(1 << 20)}",
                "listen": where,
                "ways": [],
                "held": None,
                "engine": None,
            }
        elif kind is Type.ATTACH:
            body |= {"want": body["want"][:2], "live": self.draw.random() < 0.7}
        elif kind is Type.RANK:
            body |= {"rank": 0, "ranks": 1, "group": secrets.token_bytes(16)}
        elif kind is Type.MEMBER:
            body |= {"engine": "big"}
        return body if self.draw.random() < 0.8 else None

    def _say(self, link: Link, kind: Type, body: dict[str, Any] | None = None) -> None:
        if link.closed or 0 not in link.stripes:
            return
        self._tally["sent"] += 1
        self._tally[kind.name] += 1
        handle, index = self.draw.choice([0, 1, 1, 2, 65535]), 0
        if kind in SIGNED:
            data = self.nonsense.signed(kind)
        elif kind is Type.PIECE:
            data, index = self.nonsense.piece(), self.draw.choice([0, 1, 2, 7, (1 << 32) - 1])
        elif kind is Type.ENROL and body is None and self.draw.random() < 0.5:
            data = encode(messages.Enrol(request(new_key())))
        elif kind is Type.WORKER_REPORT and body is None:
            data = encode(messages.WorkerReport(msgpack.packb(self._report()), self.draw.choice([0, 1 << 62])))
        else:
            data = self.nonsense.encoded(kind) if body is None else msgpack.packb(body)
        link.stripes[0].write(HEADER.pack(len(data), kind, handle, index) + data)

    def _report(self) -> object:
        """A worker's."""
        draw = self.draw
        said = {
            "engine": "x",
            "rank": draw.choice([0, 1, 7, -1, True, 1 << 40]),
            "phase": "init",
            "version": None,
            "error": None,
            "ranks": draw.choice([1, 0, 9]),
        }
        if draw.random() < 0.3:
            said[draw.choice(list(said))] = draw.choice(["x" * 70_000, None, 0.5, [1], {}])
        return said

    def mislead(self, link: Link, owner: Heard) -> None:
        """Send an attached child false messages that a parent may send."""
        kinds = allowed(ConnectionState.DATA, Side.LISTENER)
        for _ in range(self.draw.randint(1, TO_CHILDREN)):
            self._say(link, self.draw.choice(kinds))
        if self.draw.random() < 0.3:
            link.close()


class _Parent(QuietOwner):
    """Accepts every child, and misleads it at each of its messages."""

    def __init__(self, insider: Insider) -> None:
        self._insider = insider

    def accept_link(self, link: Link, hello: Hello) -> None:
        link.owner = _Child(self._insider)
        link.rate_limit = None


class _Child(Heard):
    def __init__(self, insider: Insider) -> None:
        super().__init__(insider._world)
        self._insider = insider
        self._words = 0

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        super().on_link_event(link, stripe, event)
        if isinstance(event, Message) and self._words < TO_CHILDREN:
            self._words += 1
            if isinstance(event.body, messages.Ping):
                link.send(messages.Pong(event.body.t))
            with contextlib.suppress(P2PCastError):
                self._insider.mislead(link, self)


assert {kind for kind in Type if kind not in SIGNED and kind is not Type.PIECE} == set(RECORDS)
