"""A peer's certificate: bought with the join token on the first connection, kept in the state folder, renewed while the peer runs.

Promises: a certificate that is in force is used as it is, so a token that has expired meanwhile stops nobody who is in; the next one is asked for after a third of its life; one that
has expired because the hub was away is requested anew with the same key. A hub that knows the key accepts it, whatever has become of the token. If a hub refuses to renew, the peer enrols as a newcomer does.
No refusal of a new certificate ends a peer that has had one in force: the peer goes on trying.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from p2pcast.addresses import Address
from p2pcast.errors import RefusedError, RetryableError, UntrustedError
from p2pcast.transport.enrol import enrol
from p2pcast.trust.certificates import fingerprint, new_key
from p2pcast.trust.contexts import Tls
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.roles import Certified
from p2pcast.wire.token import Token

logger = logging.getLogger("p2pcast.peer")

FILE = "link.pem"
ASK_AGAIN_S = 30.0
"""A request for the next certificate that was not answered is made again after that, or after a tenth of the certificate's life."""


class Papers:
    """``tls`` lets nobody in or out before there is a certificate, and stays the same object. ``hub`` None: there is none, ever."""

    def __init__(
        self, state: Path, hub: Address | None, token: Token, node: bytes, name: str, blocking: Callable[..., Awaitable[Any]]
    ) -> None:
        self._path = state / FILE
        self._hub = hub
        self._token = token
        self._who = Certified(token.run, node, "peer")
        self._name = name
        self._blocking = blocking
        self._held: Credentials | None = None
        self._asked_at = 0.0
        self._asked = False
        """The hub has not answered yet."""
        self._refused = False
        """The hub does not renew this certificate."""
        self._was_in = False
        """A certificate was in force while this process ran."""
        self._said = ""
        self.tls = Tls()

    @property
    def until(self) -> float | None:
        """When the certificate ends, in Unix seconds."""
        return None if self._held is None else self._held.until

    async def load(self) -> None:
        """What is kept from before, if it fits. Raises LocalError."""
        if self._path.exists():
            kept: Credentials = await self._blocking(Credentials.load, self._path)
            if kept.who == self._who and fingerprint(kept.authority) == self._token.authority:
                self._use(kept)

    async def ready(self) -> None:
        """A certificate that is in force. Raises RetryableError, RefusedError, LocalError."""
        held, now = self._held, time.time()
        if self._hub is None or not (held is None or self._refused or held.expired(now)):
            return
        key = new_key() if held is None else held.key
        try:
            bought = await enrol(*self._hub, self._token, self._who.node, self._name, "peer", key)
        except RefusedError as error:
            if held is None or not self._was_in or isinstance(error, UntrustedError):
                raise
            if str(error) != self._said:
                self._said = str(error)
                logger.warning("no new certificate: %s; the present one is valid until %s", error, time.ctime(held.until))
            if held.expired(now):
                raise RetryableError(f"no certificate: {error}") from None
            self._refused, self._asked_at = False, now + (held.until - held.begun) / 10
            return
        await self._blocking(bought.save, self._path)
        self._use(bought)
        logger.info("this peer has a certificate for %.1f days", (bought.until - time.time()) / 86400)

    def renewal_refused(self) -> bool:
        """The hub has ended the connection with a refusal: whether that may have been for the request for the next certificate. Then ``ready`` asks as a newcomer does."""
        refused, self._asked = self._asked, False
        self._refused |= refused
        return refused

    def request(self) -> bytes | None:
        """To be sent to the hub, when it is time for the next certificate."""
        held, now = self._held, time.time()
        if held is None or not held.due(now) or now < self._asked_at + min(ASK_AGAIN_S, (held.until - held.begun) / 10):
            return None
        self._asked_at, self._asked = now, True
        return held.request

    async def take(self, certificate: bytes) -> None:
        """The hub's answer. Raises RefusedError, LocalError."""
        if self._held is not None:
            renewed = self._held.renewed(certificate, time.time())
            await self._blocking(renewed.save, self._path)
            self._use(renewed)
            logger.debug("certificate renewed")

    def _use(self, held: Credentials) -> None:
        self.tls.use(held)
        self._held = held
        self._asked = self._refused = False
        self._was_in |= not held.expired(time.time())
