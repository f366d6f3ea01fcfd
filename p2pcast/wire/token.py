"""The join token: which run, and the secret that admits to it (docs/wire-protocol.md, section 2)."""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass

import blake3

from p2pcast.errors import UsageError

PREFIX = "p2pc1"
RUN_BYTES = 16
SECRET_BYTES = 20

LISTENER_LABEL = b"p2pcast listener 1\0"
DIALER_LABEL = b"p2pcast dialer 1\0"


@dataclass(frozen=True, slots=True)
class Token:
    run: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Token(run={self.run.hex()}, secret=…)"

    def __str__(self) -> str:
        parts = (base64.b32encode(p).decode().rstrip("=").lower() for p in (self.run, self.secret))
        return "-".join((PREFIX, *parts))

    @property
    def ident(self) -> bytes:
        """Names the token on the wire without giving it away."""
        return blake3.blake3(self.secret).digest(length=8)

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises UsageError, never repeating the text: it may be a secret."""
        parts = text.strip().split("-")
        try:
            if len(parts) != 3 or parts[0] != PREFIX:
                raise ValueError
            run, secret = (base64.b32decode(p.upper() + "=" * (-len(p) % 8)) for p in parts[1:])
        except (ValueError, binascii.Error):
            raise UsageError(f"that is not a join token: it should look like {PREFIX}-…-…, as `p2pcast seed` wrote it") from None
        if len(run) != RUN_BYTES or len(secret) != SECRET_BYTES:
            raise UsageError("the join token was cut short or joined with something else; copy it again")
        return cls(run, secret)

    def proof(self, label: bytes, hello: bytes, nonce: bytes, node: bytes) -> bytes:
        """32 bytes that only somebody who has the secret can make, bound to the HELLO's body and to the listener."""
        return hmac.digest(self.secret, label + blake3.blake3(hello).digest() + nonce + node, "sha256")
