"""How a link to another node comes about: this node dials it, or is dialled by it at the hub's word, whichever is first.

Promises: both ways run beside each other, so neither waits for the other to fail; a link has all its stripes or there is none; only a parent that was called gets in.
Whom this node could not reach it tells the hub, which plans accordingly: also where it found another way meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from p2pcast.addresses import Address, show_address
from p2pcast.errors import P2PCastError, RefusedError
from p2pcast.relay.downstream import Downstream
from p2pcast.tasks import spawn
from p2pcast.transport.dial import DIAL_S, Stripes, UnreachableError, dial_any, probe
from p2pcast.transport.link import Link, LinkOwner, QuietOwner
from p2pcast.transport.race import race
from p2pcast.transport.sockets import Sockets
from p2pcast.transport.stripe import DEFAULT, Stripe
from p2pcast.transport.striping import STRIPES_BY_DEFAULT
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Body, Type

logger = logging.getLogger("p2pcast.peer")

CALL_S = 0.25
"""Head start of dialling over being dialled, where the hub thinks that dialling works; else it is the other way round."""
MAX_KNOWN = 4096
"""Nodes whose addresses are remembered, those that were told last."""
MAX_CALLED = 16
"""Children that are being dialled at the same time."""

Place = tuple[bytes, str, int]
"""A node, and where the hub says that it listens."""
Say = Callable[[Type, Body], bool]
"""To the hub. False when it is out of reach."""


@dataclass(slots=True, eq=False)
class _Call:
    """Waits to be dialled."""

    node: bytes
    stripes: int
    owner: LinkOwner
    link: asyncio.Future[Link | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """None: the hub says that nothing will come of it."""


class _Coming(QuietOwner):
    """Owns a link from a parent until all its stripes are there."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def look(self, link: Link) -> None:
        if len(link.stripes) < link.expected:
            return
        if self._call.link.done():
            link.close()
        else:
            link.owner = self._call.owner
            self._call.link.set_result(link)

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        self.look(link)


class Dialling:
    """Of whom the hub has said nothing (the hub itself is such a one) is dialled where the caller says, and not called. ``run`` until cancelled."""

    def __init__(self, identity: Identity, say: Say, tls: ssl.SSLContext | None, sockets: Sockets = DEFAULT) -> None:
        self._identity = identity
        self._say = say
        self._tls = tls
        self._sockets = sockets
        self._book: dict[bytes, tuple[bool, list[Address]]] = {}
        """Node → whether the hub thinks that we can dial it, and its addresses."""
        self._calls: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    async def run(self) -> None:
        """Owns what goes on in the background."""
        try:
            await asyncio.Event().wait()
        finally:
            self._ended = True
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    # -- what the hub says

    def told(self, body: Body) -> None:
        """WAYS."""
        for node, likely, ways in body["peers"]:
            self._book.pop(node, None)
            self._book[node] = likely, [(host, port) for host, port in ways]
        while len(self._book) > MAX_KNOWN:
            del self._book[next(iter(self._book))]

    def unreached(self, body: Body) -> None:
        """UNREACHED: this node has tried to dial us, or cannot be asked to."""
        for call in self._calls:
            if call.node == body["node"] and not call.link.done():
                call.link.set_result(None)

    def called(self, body: Body, downstream: Downstream) -> None:
        """CALLED: somebody would be our child, and cannot dial us."""
        if len(self._tasks) < MAX_CALLED:
            self._begin(self._answer(body, downstream), f"called by {body['node'].hex()}")

    async def _answer(self, body: Body, downstream: Downstream) -> None:
        node, addresses = body["node"], [(host, port) for host, port in body["ways"]]
        try:
            link = await dial_any(
                downstream, addresses, self._identity, purpose="data", role="parent", stripes=body["stripes"], expect=node,
                tls=self._tls, sockets=self._sockets, made=downstream.accept,
            )  # fmt: skip
        except P2PCastError as error:
            logger.info("cannot dial a child that called: %s", error)
            if isinstance(error, UnreachableError):
                self._say(Type.UNREACHED, {"node": node})
        else:
            logger.info("dialled a child that called, at %s", link.address)

    # -- links

    async def reach(
        self,
        owner: LinkOwner,
        place: Place,
        stripes: Stripes,
        *,
        call: bool = True,
        doubtful: Callable[[], None] = lambda: None,
    ) -> Link:
        """A link to a parent, all its stripes up, nothing said yet. ``call``: it may be called as well, and ``doubtful`` hears when that is all that is left.

        Raises P2PCastError.
        """
        node, host, port = place
        known = self._book.get(node)
        if known is None or not call:
            return await self._dial(owner, node, [(host, port)] if known is None else known[1], stripes)
        likely, addresses = known
        dialled: list[P2PCastError | None] = []
        stands, failed = asyncio.Event(), asyncio.Event()

        async def dial() -> Link:
            try:
                link = await self._dial(owner, node, addresses, stripes, stands.set)
            except P2PCastError as error:
                dialled.append(error)
                failed.set()
                if isinstance(error, UnreachableError) and addresses:
                    self._say(Type.UNREACHED, {"node": node})
                doubtful()
                raise
            dialled.append(None)
            return link

        async def be_dialled() -> Link:
            if likely and stands.is_set():
                # Somebody has accepted: it is there, and busy. To be dialled by it would not make it less so.
                await failed.wait()
            # Whoever is dialled has to say how many, and knows no round trip.
            link = await self._call(owner, node, stripes if isinstance(stripes, int) else STRIPES_BY_DEFAULT)
            link.reserve = not isinstance(stripes, int)
            return link

        attempts: list[Callable[[], Coroutine[Any, Any, Link]]] = [dial, be_dialled] if likely else [be_dialled, dial]
        try:
            outcome = await race(attempts, CALL_S, _drop)
        finally:
            name = f"is {node.hex()} there"
            if (
                not dialled
                and not stands.is_set()
                and addresses
                and likely
                and name not in {task.get_name() for task in self._tasks}
            ):
                self._begin(self._learn(node, addresses), name)
        link, errors = outcome
        if link is None:
            raise dialled[0] or errors[0]
        return link

    async def _dial(
        self, owner: LinkOwner, node: bytes, addresses: list[Address], stripes: Stripes, stands: Callable[[], None] = lambda: None
    ) -> Link:
        return await dial_any(
            owner, addresses, self._identity, purpose="data", role="child", stripes=stripes, expect=node,
            tls=self._tls, sockets=self._sockets, stands=stands,
        )  # fmt: skip

    async def _call(self, owner: LinkOwner, node: bytes, stripes: int) -> Link:
        call = _Call(node, stripes, owner)
        if not self._say(Type.CALL, {"node": node, "stripes": stripes}):
            raise UnreachableError("the hub is out of reach: nobody can ask that node to dial us")
        self._calls.append(call)
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.wait([call.link])
        except TimeoutError:
            pass
        except BaseException:
            if call.link.done() and (late := call.link.result()) is not None:
                late.abort()
            raise
        finally:
            self._calls.remove(call)
        if not call.link.done():
            raise UnreachableError(f"it was asked to dial us, and has not within {DIAL_S:.0f} s")
        if (link := call.link.result()) is None:
            raise UnreachableError("it cannot dial us either")
        return link

    def accept(self, link: Link, hello: Body) -> None:
        """A parent has dialled us. Raises RefusedError unless it was asked to."""
        for call in self._calls:
            if call.node == link.remote and call.stripes == hello["stripes"] and not call.link.done():
                coming = _Coming(call)
                link.owner = coming
                coming.look(link)
                return
        raise RefusedError("nobody here has asked this node to dial")

    # -- in the background

    async def _learn(self, node: bytes, addresses: list[Address]) -> None:
        """Another way was faster than an answer: is there one at all?"""
        answers = await asyncio.gather(*(probe(address, self._identity, node, self._tls) for address in addresses))
        if not any(answer is not False for answer in answers):
            logger.info("nobody answers at %s", ", ".join(show_address(*address) for address in addresses))
            self._say(Type.UNREACHED, {"node": node})

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._ended:
            work.close()
            return
        task = spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _drop(link: Link) -> None:
    link.abort()
