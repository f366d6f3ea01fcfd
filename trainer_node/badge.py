"""What a training process shows of itself at the hub: a certificate as trainer, bought with the join token and kept in memory alone."""

from __future__ import annotations

import secrets
import ssl
import time

from p2pcast.errors import RefusedError
from p2pcast.transport.enrol import enrol
from p2pcast.trust.certificates import new_key
from p2pcast.trust.contexts import Tls
from p2pcast.trust.credentials import Credentials
from p2pcast.wire.token import Token


class Badge:
    """One process's, for all its connections, one after the other."""

    def __init__(self, token: Token) -> None:
        self.token = token
        self.node = secrets.token_bytes(16)
        self._key = new_key()
        self._held: Credentials | None = None
        self._tls = Tls()

    async def show(self, hub: tuple[str, int], name: str) -> ssl.SSLContext | None:
        """For the next connection: with a certificate that is in force; None where links are plain text. Raises RetryableError, RefusedError."""
        if not self.token.authority:
            return None
        if self._held is None or self._held.due(time.time()):
            try:
                self._held = await enrol(*hub, self.token, self.node, name, "trainer", self._key)
            except RefusedError:
                # The hub may have lost what it knew of this node: what it has issued is in force all the same.
                if self._held is None or self._held.expired(time.time()):
                    raise
            else:
                self._tls.use(self._held)
        return self._tls.client
