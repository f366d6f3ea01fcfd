"""A peer's certificate: issued for the join token on the first connection, kept in the state folder, and renewed while
the peer runs.

Guarantees: the node id and key are on disk before the hub sees them, so a crash or a lost answer loses no identity. A
valid certificate needs no token, so an expired token stops no peer of the run. The next certificate is requested after
a third of the lifetime. An expired certificate, or one from an authority that the run has replaced, is requested again
with the same key; a hub that knows the key accepts it without the token. If a hub refuses to renew, the peer enrols as
a new peer. A refusal never stops a peer that had a valid certificate: it retries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from p2pcast.ground.addresses import Address
from p2pcast.ground.errors import RefusedError, RetryableError, UntrustedError
from p2pcast.transport.enrolment import enrol, patience_s
from p2pcast.transport.node_certificate import KeptCertificate
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.key_files import kept_key
from p2pcast.trust.tls_contexts import Tls

logger = logging.getLogger("p2pcast.peer")

FILE, KEY = "link.pem", "link.key"
ASK_AGAIN_S = 30.0
"""Seconds before an unanswered request is repeated; at most a tenth of the certificate's lifetime."""


class PeerCertificate:
    """``tls`` allows no connection until there is a certificate, and stays the same object. ``hub``: None if the run
    has no hub.
    """

    def __init__(
        self,
        state: Path,
        hub: Address | None,
        token: JoinToken,
        node: bytes,
        name: str,
        blocking: Callable[..., Awaitable[Any]],
    ) -> None:
        self._kept = KeptCertificate(state / FILE, Certified(token.run, node, "peer"), token.authority)
        self._hub = hub
        self._token = token
        self._name = name
        self._blocking = blocking
        self._asked_at = 0.0
        self._asked = False
        """Whether a request is waiting for an answer."""
        self._refused = False
        """Whether the hub has refused to renew this certificate."""
        self._logged_refusal = ""
        self._unanswered = 0
        """Number of consecutive enrolments that the hub did not answer."""

    @property
    def tls(self) -> Tls:
        return self._kept.tls

    @property
    def until(self) -> float | None:
        """When the certificate expires, in Unix seconds."""
        return self._kept.until

    async def load(self) -> None:
        """Load the certificate in the state folder if it belongs to this node and this run. Raises LocalError."""
        found: Credentials | None = await self._blocking(self._kept.read)
        if found is not None:
            self._use(found)

    async def ready(self) -> None:
        """Make sure that there is a valid certificate. Raises RetryableError, RefusedError, LocalError."""
        held, now = self._kept.held, time.time()
        if self._hub is None or not (held is None or self._refused or not held.in_force(now)):
            return
        key = self._kept.key or await self._blocking(kept_key, self._kept.path.with_name(KEY))
        self._unanswered += 1
        try:
            issued = await enrol(
                *self._hub, self._token, self._kept.who.node, self._name, "peer", key,
                timeout_s=patience_s(self._unanswered),
            )  # fmt: skip
        except RefusedError as error:
            if held is None or not self._kept.was_in_force or isinstance(error, UntrustedError):
                raise
            if str(error) != self._logged_refusal:
                self._logged_refusal = str(error)
                logger.warning(
                    "no new certificate: %s; the present one is valid until %s", error, time.ctime(held.until)
                )
            if not held.in_force(now):
                raise RetryableError(f"no certificate: {error}") from None
            self._refused, self._asked_at = False, now + (held.until - held.begun) / 10
            return
        self._unanswered = 0
        await self._blocking(issued.save, self._kept.path)
        self._use(issued)
        logger.info("this peer has a certificate for %.1f days", (issued.until - time.time()) / 86400)

    def renewal_refused(self) -> bool:
        """Whether the hub's refusal, which closed the connection, may be for the request of the next certificate. If
        so, ``ready`` then enrols this node as a new peer.
        """
        refused, self._asked = self._asked, False
        self._refused |= refused
        return refused

    def request(self) -> bytes | None:
        """Return the request for the next certificate if it is due, otherwise None. Records that it was sent."""
        held, now = self._kept.held, time.time()
        if held is None or not held.due(now) or now < self._asked_at + min(ASK_AGAIN_S, (held.until - held.begun) / 10):
            return None
        self._asked_at, self._asked = now, True
        return held.request

    async def take(self, certificate: bytes) -> None:
        """Store the renewed certificate sent by the hub. Raises RefusedError, LocalError."""
        if self._kept.held is not None:
            renewed = self._kept.held.renewed(certificate, time.time())
            await self._blocking(renewed.save, self._kept.path)
            self._use(renewed)
            logger.debug("certificate renewed")

    def _use(self, held: Credentials) -> None:
        self._kept.use(held)
        self._asked = self._refused = False
