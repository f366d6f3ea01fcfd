"""A peer's control connection to the hub: joins, reports, and passes on what the hub says. Reconnects for as long as the peer lives."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Protocol

from p2pcast.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UntrustedError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.version import Version
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.messages import SCHEMA, Body, Type
from rollout_node.papers import Papers

logger = logging.getLogger("p2pcast.peer")

REPORT_S = 1.0
SILENCE_S = 5.0
"""The hub PINGs every second; one that is silent for so long is gone, or cut off."""
RETRY_MIN_S = 0.2
RETRY_MAX_S = 5.0
"""Before another try to reach the hub: half to one and a half times as long, doubled each time."""


class ControlOwner(Protocol):
    def on_hub_message(self, kind: Type, body: Body) -> None: ...
    def on_hub_lost(self) -> None: ...
    def on_hub_refused(self, error: RefusedError) -> None:
        """It will not have us, so there is no use in coming back."""


class Control:
    """``join`` and ``report`` make the bodies of those messages when they are needed. ``engine``: name and role, for a host of an engine on several.

    Without an ``address`` there is no hub, ever."""

    def __init__(
        self,
        owner: ControlOwner,
        address: tuple[str, int] | None,
        identity: Identity,
        join: Callable[[], Body],
        report: Callable[[], Body],
        papers: Papers | None,
        engine: tuple[str, str] | None = None,
    ) -> None:
        self._owner = owner
        self._address = address
        self._identity = identity
        self._join = join
        self._report = report
        self._papers = papers
        self._engine = engine
        self._link: Link | None = None
        self._heard_at = 0.0
        self._changed = asyncio.Event()
        self._refusal: RefusedError | None = None
        self._lost = asyncio.Event()
        self.left = False
        """We have said goodbye, and do not come back."""
        self.hub: bytes = b""
        """The hub's node, once it has answered."""
        self.joined_at = 0.0
        """When it was last dialled with success, by the loop's clock."""
        self.hub_answered = False
        """This process has reached it."""

    @property
    def heard_at(self) -> float | None:
        """When the hub last said anything, by the loop's clock; None: it has not yet."""
        return self._heard_at if self.hub_answered else None

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._link.closed

    async def connect(self) -> None:
        """Dial and join. Raises RetryableError (unreachable), RefusedError (token, run)."""
        if self._address is None:
            raise RetryableError("this peer has no hub")
        self._lost.clear()
        if self._papers is not None:
            await self._papers.ready()
        tls = None if self._papers is None else self._papers.tls.client
        link = await dial(self, *self._address, self._identity, purpose="control", role="peer", tls=tls)
        self.hub = link.remote
        self.hub_answered = True
        self._link = link
        self._heard_at = self.joined_at = asyncio.get_running_loop().time()
        link.send(Type.JOIN, self._join() | {"engine": None if self._engine is None else list(self._engine)})

    def hang_up(self) -> None:
        """Give up a connection on which the hub has not answered."""
        if self._link is not None:
            self._link.abort()

    async def run(self) -> None:
        """Report, and come back whenever the hub is lost. Until cancelled; raises RefusedError when the hub will not have us back."""
        if self._address is None:
            await asyncio.Event().wait()
        while True:
            await self._stay()
            if self._refusal is not None:
                raise self._refusal
            if self.left:
                await asyncio.Event().wait()
            self._owner.on_hub_lost()
            wait_s = RETRY_MIN_S
            while not self.connected:
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
                if self.left:
                    await asyncio.Event().wait()
                wait_s = min(RETRY_MAX_S, wait_s * 2)
                try:
                    await self.connect()
                except UntrustedError as error:
                    logger.warning("hub: %s", error)
                except RefusedError:
                    raise
                except P2PCastError as error:
                    logger.debug("hub: %s", error)
            logger.info("back at the hub")

    def say(self, kind: Type, body: Body) -> bool:
        """False when the hub is out of reach."""
        if self._link is None or self._link.closed:
            return False
        self._link.send(kind, body)
        return True

    @property
    def own_host(self) -> str:
        """The address from which this machine speaks to the hub."""
        return "" if self._link is None else self._link.own_host

    def changed(self) -> None:
        """Something worth a report at once."""
        self._changed.set()

    def send(self, kind: Type, body: Body) -> None:
        """Lost where the hub is out of reach."""
        if self._link is not None:
            self._link.send(kind, body)

    def ask_squash(self, base: Version) -> bool:
        """For one from ``base`` to the newest version; the answer is SQUASHING. False while the hub is out of reach."""
        if self._link is None or self._link.closed:
            return False
        self._link.send(Type.SQUASH, {"base": list(base)})
        return True

    async def leave(self) -> None:
        self.left = True
        if self._link is not None and not self._link.closed:
            self._link.send(Type.LEAVE, {})
            self._link.close()
            await asyncio.sleep(0)

    async def _stay(self) -> None:
        loop = asyncio.get_running_loop()
        link = self._link
        while link is not None and not link.closed:
            self._tell(link)
            if self._papers is not None and (request := self._papers.request()) is not None:
                link.send(Type.ENROL, {"request": request})
            self._changed.clear()
            waits = [asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(self._lost.wait())]
            try:
                await asyncio.wait(waits, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if loop.time() - self._heard_at > SILENCE_S:
                link.abort(RetryableError(f"the hub has been silent for {SILENCE_S:.0f} s"))

    def _tell(self, link: Link) -> None:
        report = self._report()
        try:
            link.send(Type.REPORT, report)
        except RemoteError as error:
            # Engines may have named themselves, or what ails them, at any length.
            logger.warning("the hub is told the least: %s", error)
            link.send(Type.REPORT, {key: report[key] for key in SCHEMA[Type.REPORT]})

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if isinstance(event, Message):
            if event.type is Type.PING:
                link.send(Type.PONG, {"t": event.body["t"]})
            elif event.type is not Type.PONG:
                try:
                    self._owner.on_hub_message(event.type, event.body)
                except P2PCastError as error:
                    link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        if error is not None:
            logger.warning("hub: %s", error)
        if isinstance(error, RefusedError) and not (self._papers is not None and self._papers.renewal_refused()):
            self._refusal = error
            self._owner.on_hub_refused(error)
        self._lost.set()
