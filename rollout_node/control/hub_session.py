"""A peer's control connection to the hub. It joins, sends reports and passes on the hub's messages, and reconnects for
as long as the peer runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from p2pcast.ground.backoff import REDIAL_MAX_S, REDIAL_MIN_S, Backoff
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UntrustedError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.process.repeated_messages import TROUBLE_ENDED
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Identity, Message
from rollout_node.control.peer_certificate import PeerCertificate

logger = logging.getLogger("p2pcast.peer")

REPORT_S = 1.0
"""Seconds between two reports if nothing changes."""
SILENCE_S = 5.0
"""A hub that has been silent for this many seconds counts as lost; it sends a PING every second."""


class HubSessionOwner(Protocol):
    def on_hub_message(self, record: messages.Record) -> None: ...
    def on_hub_lost(self) -> None: ...
    def on_hub_refused(self, error: RefusedError) -> None:
        """Called when the hub refuses this peer, so that further attempts are pointless."""


class HubSession:
    """``join`` builds JOIN from this machine's address on the connection. ``address``: None if the run has no hub."""

    def __init__(
        self,
        owner: HubSessionOwner,
        address: tuple[str, int] | None,
        identity: Identity,
        join: Callable[[str], messages.Join],
        certificate: PeerCertificate | None,
    ) -> None:
        self._owner = owner
        self._address = address
        self._identity = identity
        self._join = join
        self._certificate = certificate
        self._link: Link | None = None
        self._last_received_at = 0.0
        self._changed = asyncio.Event()
        self._refusal: RefusedError | None = None
        self._lost = asyncio.Event()
        self.left = False
        """Whether LEAVE was sent, after which there is no reconnection."""
        self.hub: bytes = b""
        """The hub's node id; empty until it has answered."""
        self.joined_at = 0.0
        """When the last connection was made, by the loop's clock."""
        self.hub_answered = False
        """Whether this process has ever reached the hub."""

    @property
    def last_received_at(self) -> float | None:
        """When the last bytes came from the hub, by the loop's clock; None before the first connection."""
        return self._last_received_at if self.hub_answered else None

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._link.closed

    async def connect(self) -> None:
        """Dial and join. Raises RetryableError (unreachable), RefusedError (token, run)."""
        if self._address is None:
            raise RetryableError("this peer has no hub")
        self._lost.clear()
        if self._certificate is not None:
            await self._certificate.ready()
        tls = None if self._certificate is None else self._certificate.tls.client
        link = await dial(self, *self._address, self._identity, purpose="control", role="peer", tls=tls)
        self.hub = link.remote
        self.hub_answered = True
        self._link = link
        self._last_received_at = self.joined_at = asyncio.get_running_loop().time()
        link.send(self._join(link.own_host))

    def hang_up(self) -> None:
        """Abort a connection on which the hub does not answer."""
        if self._link is not None:
            self._link.abort()

    async def run(self, report: Callable[[], messages.Report]) -> None:
        """Send reports, and reconnect whenever the hub is lost, until cancelled. ``report`` builds a REPORT. Raises
        RefusedError if the hub refuses this peer.
        """
        if self._address is None:
            await asyncio.Event().wait()
        while True:
            await self._send_reports(report)
            if self._refusal is not None:
                raise self._refusal
            if self.left:
                await asyncio.Event().wait()
            self._owner.on_hub_lost()
            backoff = Backoff(REDIAL_MIN_S, REDIAL_MAX_S, uniform)
            while not self.connected:
                await asyncio.sleep(backoff.next_s())
                if self.left:
                    await asyncio.Event().wait()
                try:
                    await self.connect()
                except UntrustedError as error:
                    logger.warning("hub: %s", error)
                except RefusedError:
                    raise
                except P2PCastError as error:
                    logger.debug("hub: %s", error)
            logger.info("back at the hub", extra=TROUBLE_ENDED)

    @property
    def place(self) -> tuple[bytes, str, int]:
        """The hub's node id and address."""
        assert self._address is not None, "only a hub sends plans"
        return (self.hub, *self._address)

    def send(self, record: messages.Record) -> bool:
        """Send a message. False if the hub is unreachable, in which case the message is lost."""
        if self._link is None or self._link.closed:
            return False
        self._link.send(record)
        return True

    def changed(self) -> None:
        """Send a report at once."""
        self._changed.set()

    def ask_squash(self, base: Version) -> bool:
        """Ask for a squash from ``base`` to the newest version; the answer is SQUASHING. False if it cannot be sent."""
        return self.send(messages.Squash(base))

    def find_sources(self, artifact: bytes, without: list[bytes]) -> None:
        """Ask which nodes hold an artifact; the answer is SOURCES. The request is lost if the hub is unreachable."""
        self.send(messages.FindSources(artifact, without))

    async def leave(self) -> None:
        self.left = True
        if self._link is not None and not self._link.closed:
            self._link.send(messages.Leave())
            self._link.close()
            await asyncio.sleep(0)

    async def _send_reports(self, report: Callable[[], messages.Report]) -> None:
        """Send reports until the connection closes."""
        loop = asyncio.get_running_loop()
        link = self._link
        while link is not None and not link.closed:
            self._send_report(link, report())
            if self._certificate is not None and (request := self._certificate.request()) is not None:
                link.send(messages.Enrol(request))
            self._changed.clear()
            waits = [asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(self._lost.wait())]
            try:
                await asyncio.wait(waits, timeout=REPORT_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if loop.time() - self._last_received_at > SILENCE_S:
                link.abort(RetryableError(f"the hub has been silent for {SILENCE_S:.0f} s"))

    def _send_report(self, link: Link, report: messages.Report) -> None:
        try:
            link.send(report)
        except RemoteError as error:
            # Engines choose their names and error texts, which may be of any length.
            logger.warning("the report is cut to its required keys: %s", error)
            link.send(messages.Report(report.parent, report.staged, report.committed))

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if isinstance(event, Message):
            if isinstance(event.body, messages.Ping):
                link.send(messages.Pong(event.body.t))
            elif not isinstance(event.body, messages.Pong):
                try:
                    self._owner.on_hub_message(event.body)
                except P2PCastError as error:
                    link.close(error)

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._last_received_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        if error is not None:
            logger.warning("hub: %s", error)
        if isinstance(error, RefusedError) and not self._renewal_refused():
            self._refusal = error
            self._owner.on_hub_refused(error)
        self._lost.set()

    def _renewal_refused(self) -> bool:
        """Whether only the request for the next certificate may have been refused, so that the peer may come back."""
        return self._certificate is not None and self._certificate.renewal_refused()
