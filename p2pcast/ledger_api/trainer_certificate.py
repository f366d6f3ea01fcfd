"""A training process's certificate, which the hub issues for the join token. It is kept only in memory.

Guarantee: a lost response costs no identity. A process repeats its request with the same id and key, and the hub
answers again at no cost. A process has no state folder, so its id is as new as its key: the hub never sees a known id
with a different key. A restarted process thus uses up another admission of a token with ``--uses``.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from pathlib import Path

from p2pcast.ground.addresses import parse_address
from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.plain_text import written_text
from p2pcast.transport.enrolment import enrol, patience_s
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Role
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.server_role import client_context
from p2pcast.trust.tls_contexts import Tls

DEFAULT_PORT = 7077
TOKEN_VARIABLE = "P2PCAST_TOKEN"


def hub_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises UsageError."""
    return parse_address(text, default_host="127.0.0.1", default_port=DEFAULT_PORT)


def join_token(file: str | os.PathLike[str] | None) -> JoinToken:
    """Read the token from ``file``, or else from $P2PCAST_TOKEN. No message contains the token. Raises UsageError."""
    if file is None:
        text = os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            raise UsageError(
                f"a join token is needed: token_file (as `p2pcast seed --token-file` wrote it), or ${TOKEN_VARIABLE}"
            )
        return JoinToken.parse(text)
    try:
        return JoinToken.parse(written_text(Path(file).read_bytes()))
    except OSError as error:
        raise UsageError(f"cannot read the token file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not a token file") from None


class TrainerCertificate:
    """A trainer process's certificate, used for all its connections."""

    def __init__(self, token: JoinToken) -> None:
        self.token = token
        self.node = secrets.token_bytes(16)
        self._key = new_key()
        self._held: Credentials | None = None
        self._unanswered = 0
        """Number of consecutive enrolments that the hub did not answer."""
        self._tls = Tls()

    async def show(self, hub: tuple[str, int], name: str) -> ssl.SSLContext | None:
        """The TLS context for the next connection to the hub, with a valid certificate; None if links are plain text.
        Raises RetryableError or RefusedError.
        """
        if not self.token.authority:
            return None
        await self._renew_when_due(hub, name)
        return self._tls.client

    async def client(self, hub: tuple[str, int], name: str, server: Role) -> ssl.SSLContext:
        """The TLS context for a server with a different role. Raises RetryableError, RefusedError or UsageError."""
        if not self.token.authority:
            raise UsageError("this token's hub was started with --plaintext, and issues no certificates")
        return client_context(await self._renew_when_due(hub, name), server)

    async def _renew_when_due(self, hub: tuple[str, int], name: str) -> Credentials:
        if self._held is None or self._held.due(time.time()):
            try:
                self._unanswered += 1
                self._held = await enrol(
                    *hub, self.token, self.node, name, "trainer", self._key, timeout_s=patience_s(self._unanswered)
                )
                self._unanswered = 0
            except RefusedError:
                # The hub may have lost its record of this node, but the issued certificate is still valid.
                if self._held is None or not self._held.in_force(time.time()):
                    raise
            else:
                self._tls.use(self._held)
        return self._held
