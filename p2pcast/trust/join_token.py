"""The join token: which run, the secret that admits to it, and the authority whose certificates count in it
(docs/formats/wire-protocol.md, section 2).
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass

import blake3

from p2pcast.ground.errors import UsageError

PREFIX = "p2pc1"
RUN_BYTES = 16
SECRET_BYTES = 20
AUTHORITY_BYTES = 32

LISTENER_LABEL = b"p2pcast listener %d\0"
DIALER_LABEL = b"p2pcast dialer %d\0"
"""Formatted with the settled protocol."""
UNKNOWN_TOKEN = "the token is not one that this hub gave out: check that token and hub belong together"


@dataclass(frozen=True, slots=True)
class JoinToken:
    """``authority``: SHA-256 of the authority's certificate; empty where links are plain text."""

    run: bytes
    secret: bytes
    authority: bytes = b""

    def __repr__(self) -> str:
        return f"JoinToken(run={self.run.hex()}, secret=…)"

    def __str__(self) -> str:
        parts = (self.run, self.secret, self.authority) if self.authority else (self.run, self.secret)
        return "-".join((PREFIX, *map(_base32, parts)))

    @property
    def ident(self) -> bytes:
        """Identifies the token on the wire without revealing its secret."""
        return blake3.blake3(self.secret).digest(length=8)

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """One text, in either case, is one token. A byte order mark at the start is ignored. Raises UsageError, never
        repeating the text: it may be a secret.
        """
        text = text.removeprefix("\ufeff").strip().lower()
        prefix, *parts = text.split("-")
        try:
            if not 2 <= len(parts) <= 3 or prefix != PREFIX:
                raise ValueError
            run, secret, *more = (base64.b32decode(p.upper() + "=" * (-len(p) % 8)) for p in parts)
        except (ValueError, binascii.Error):
            raise UsageError(
                f"that is not a join token: it should look like {PREFIX}-…-…, as `p2pcast seed` wrote it"
            ) from None
        if len(run) != RUN_BYTES or len(secret) != SECRET_BYTES or any(len(m) != AUTHORITY_BYTES for m in more):
            raise UsageError("the join token was cut short or joined with something else; copy it again")
        # Base32 leaves up to four bits of a last letter without meaning.
        if list(map(_base32, (run, secret, *more))) != parts:
            raise UsageError("a letter of the join token is wrong; copy it again")
        return cls(run, secret, *more)

    def check_links(self, *, plaintext: bool) -> None:
        """Raise UsageError if only one of this command and the token's hub uses ``--plaintext``."""
        if plaintext and self.authority:
            raise UsageError("this token's hub encrypts its links: leave --plaintext out")
        if not plaintext and not self.authority:
            raise UsageError("this token's hub was started with --plaintext: say so here too, or start it without")

    def proof(self, label: bytes, hello: bytes, nonce: bytes, node: bytes, channel: bytes = b"") -> bytes:
        """32 bytes that prove knowledge of the secret, bound to the HELLO's body and to the listener. ``channel``:
        SHA-256 of the listener's certificate, behind TLS.
        """
        return hmac.digest(self.secret, label + blake3.blake3(hello).digest() + nonce + node + channel, "sha256")


def _base32(part: bytes) -> str:
    return base64.b32encode(part).decode().rstrip("=").lower()
