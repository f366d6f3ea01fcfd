"""Opens links to other nodes. This node dials, and also asks the hub to have the other node dial back; whichever link
comes up first is used.

Guarantees:

- Both attempts run concurrently, so neither waits for the other to fail.
- A link that does not get all its stripes is dropped.
- An incoming link from a parent is refused unless this node asked for it.

Nodes that could not be dialled are reported to the hub even if the dial-back worked, so that it can plan around them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from p2pcast.ground.addresses import Address, show_address
from p2pcast.ground.errors import P2PCastError, RefusedError
from p2pcast.ground.limits import MAX_CALLS_PER_NODE
from p2pcast.process.background_tasks import spawn
from p2pcast.relay.downstream import Downstream
from p2pcast.transport.dial import DIAL_S, Stripes, UnreachableError, dial_any, probe
from p2pcast.transport.happy_eyeballs import race
from p2pcast.transport.link import Link, LinkOwner, QuietOwner
from p2pcast.transport.socket_options import Sockets
from p2pcast.transport.stripe import DEFAULT, Stripe
from p2pcast.transport.stripe_count import FEWEST
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity

logger = logging.getLogger("p2pcast.peer")

CALL_S = 0.25
"""Head start in seconds of the attempt that the hub expects to work, dialling or being dialled."""
MAX_KNOWN = 4096
"""Number of nodes whose addresses are remembered: those that the hub named most recently."""
MAX_CALLED = 16
"""Limit on concurrently dialled children."""

Place = tuple[bytes, str, int]
"""A node, and the host and port on which it listens according to the hub."""
Send = Callable[[messages.Record], bool]
"""Sends a message to the hub; returns False while the hub is unreachable."""
Owner = TypeVar("Owner", bound=LinkOwner)
Adopt = Callable[[Link], None]
"""Sets the owner of a link with all its stripes, before the first event."""


@dataclass(slots=True, eq=False)
class _Call:
    """A request to be dialled by ``node``."""

    node: bytes
    stripes: int
    adopt: Adopt
    link: asyncio.Future[Link | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The dialled-back link; None if the hub says that ``node`` cannot dial."""


class _Coming(QuietOwner):
    """Owns a link from a parent until all its stripes are connected."""

    def __init__(self, call: _Call, link: Link) -> None:
        self._call = call
        link.expect_first_message("other stripes", DIAL_S)

    def hand_over(self, link: Link) -> None:
        if len(link.stripes) < link.expected:
            return
        link.introduced()
        if self._call.link.done():
            link.close()
        else:
            self._call.adopt(link)
            self._call.link.set_result(link)

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        self.hand_over(link)


class Connector:
    """Opens links while ``run`` is running. A node for which the hub gave no addresses, such as the hub itself, is
    dialled only at the address given by the caller.
    """

    def __init__(self, identity: Identity, send: Send, tls: ssl.SSLContext | None, sockets: Sockets = DEFAULT) -> None:
        self._identity = identity
        self._send = send
        self._tls = tls
        self._sockets = sockets
        self._book: dict[bytes, tuple[bool, list[Address]]] = {}
        """Node → whether the hub expects that this node can dial it, and its addresses."""
        self._calls: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    async def run(self) -> None:
        """Own the background tasks until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            self._ended = True
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    # -- messages from the hub

    def learn_addresses(self, body: messages.Addresses) -> None:
        """Handle ADDRESSES: remember the nodes' addresses."""
        for node, likely, ways in body.peers:
            self._book.pop(node, None)
            self._book[node] = likely, [(host, port) for host, port in ways]
        while len(self._book) > MAX_KNOWN:
            del self._book[next(iter(self._book))]

    def stop_waiting(self, body: messages.Unreachable) -> None:
        """Handle UNREACHABLE: the other node could not dial this one, or cannot be asked to."""
        for call in self._calls:
            if call.node == body.node and not call.link.done():
                call.link.set_result(None)

    def dial_child(self, body: messages.Called, downstream: Downstream) -> None:
        """Handle CALLED: dial a node that wants to be a child of this one but cannot dial it."""
        name = f"called by {body.node.hex()}"
        running = [task.get_name() for task in self._tasks]
        if len(running) < MAX_CALLED and running.count(name) < MAX_CALLS_PER_NODE:
            self._begin(self._answer(body, downstream), name)

    async def _answer(self, body: messages.Called, downstream: Downstream) -> None:
        node, addresses = body.node, list(body.ways)
        try:
            link = await dial_any(
                downstream, addresses, self._identity, purpose="data", role="parent", stripes=body.stripes,
                expect=node, tls=self._tls, sockets=self._sockets, made=downstream.accept,
            )  # fmt: skip
        except P2PCastError as error:
            logger.info("cannot dial a child that called: %s", error)
            if isinstance(error, UnreachableError):
                self._send(messages.Unreachable(node))
        else:
            logger.info("dialled a child that called, at %s", link.address)

    # -- links

    async def reach(
        self,
        build: Callable[[Link], Owner],
        place: Place,
        stripes: Stripes,
        *,
        call: bool = True,
        on_dial_failed: Callable[[], None] = lambda: None,
    ) -> Owner:
        """Return the owner of a link to a parent with all its stripes. ``build`` creates the owner of each link that
        comes up, before the first message; a second link is dropped. ``call``: whether the parent may also be asked to
        dial. ``on_dial_failed`` is called when that is the only attempt left.

        Raises P2PCastError.
        """
        owners: dict[Link, Owner] = {}

        def adopt(link: Link) -> None:
            link.owner = owners[link] = build(link)

        return owners[await self._reach(adopt, place, stripes, call=call, on_dial_failed=on_dial_failed)]

    async def _reach(
        self, adopt: Adopt, place: Place, stripes: Stripes, *, call: bool, on_dial_failed: Callable[[], None]
    ) -> Link:
        node, host, port = place
        known = self._book.get(node)
        if known is None or not call:
            return await self._dial(adopt, node, [(host, port)] if known is None else known[1], stripes)
        likely, addresses = known
        dialled: list[P2PCastError | None] = []
        stands, failed = asyncio.Event(), asyncio.Event()

        async def dial() -> Link:
            try:
                link = await self._dial(adopt, node, addresses, stripes, stands.set)
            except P2PCastError as error:
                dialled.append(error)
                failed.set()
                if isinstance(error, UnreachableError) and addresses:
                    self._send(messages.Unreachable(node))
                on_dial_failed()
                raise
            dialled.append(None)
            return link

        async def be_dialled() -> Link:
            if likely and stands.is_set():
                # The node accepts connections but is busy, so being dialled by it would be no faster.
                await failed.wait()
            # The dialled side sets the number of stripes, but has not measured a round trip.
            link = await self._call(adopt, node, stripes if isinstance(stripes, int) else FEWEST)
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
        self,
        adopt: Adopt,
        node: bytes,
        addresses: list[Address],
        stripes: Stripes,
        stands: Callable[[], None] = lambda: None,
    ) -> Link:
        return await dial_any(
            QuietOwner(), addresses, self._identity, purpose="data", role="child", stripes=stripes, expect=node,
            tls=self._tls, sockets=self._sockets, made=adopt, on_connect=stands,
        )  # fmt: skip

    async def _call(self, adopt: Adopt, node: bytes, stripes: int) -> Link:
        call = _Call(node, stripes, adopt)
        if not self._send(messages.Call(node, stripes)):
            raise UnreachableError("the hub is out of reach, so that node cannot be asked to dial this one")
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
            raise UnreachableError(f"the node was asked to dial this one, and did not within {DIAL_S:.0f} s")
        if (link := call.link.result()) is None:
            raise UnreachableError("the node cannot dial this one either")
        return link

    def accept(self, link: Link, hello: messages.Hello) -> None:
        """Accept a link dialled by a parent. Raises RefusedError unless this node asked for it."""
        for call in self._calls:
            if call.node == link.remote and call.stripes == hello.stripes and not call.link.done():
                coming = _Coming(call, link)
                link.owner = coming
                coming.hand_over(link)
                return
        raise RefusedError("this node was not asked to dial")

    # -- in the background

    async def _learn(self, node: bytes, addresses: list[Address]) -> None:
        """Probe the addresses of a node that was reached without dialling, and report it if none answers."""
        answers = await asyncio.gather(*(probe(address, self._identity, node, self._tls) for address in addresses))
        if not any(answer is not False for answer in answers):
            logger.info("no node answers at %s", ", ".join(show_address(*address) for address in addresses))
            self._send(messages.Unreachable(node))

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._ended:
            work.close()
            return
        task = spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _drop(link: Link) -> None:
    link.abort()
