"""The hub's own join token, which it keeps in the token file.

Guarantee: the token file gets a new token long before the last one expires, and the last one stays valid until then.
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.trust.join_token import SECRET_BYTES, JoinToken
from p2pcast.trust.token_register import LEGACY_TTL_S
from trainer_node.admission.trust_files import secret_of
from trainer_node.admission.trust_state import InThread, TrustState
from trainer_node.hub_config import HubConfig

logger = logging.getLogger("p2pcast.hub")

SECRET = "token.key"
FRESH = 1 / 2
"""The hub makes its next token when less than this share of the token's lifetime is left. A copy of the token file is
valid for at least as long.
"""
DAY_S = 86400.0


class OwnToken:
    """``fingerprint``: the run authority's fingerprint; None without TLS, when the token never changes."""

    def __init__(
        self, trust: TrustState, config: HubConfig, fingerprint: bytes | None, in_thread: InThread, now: float
    ) -> None:
        """Raises LocalError."""
        self.file = config.token_file
        self.stale = False
        """Whether the token file still contains an earlier token."""
        self._trust = trust
        self._path = config.state / SECRET
        self._fingerprint = fingerprint
        self._ttl_s = config.token_ttl_s
        self._in_thread = in_thread
        if fingerprint is None:
            self.token = JoinToken(trust.run, secret_of(self._path))
        else:
            self.token = self._recalled(now) or self._granted(self._new_secret(), now)
            trust.save_ledger()

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next token."""
        if self._fingerprint is None:
            return False
        found = self._trust.ledger.tokens.get(self.token.ident.hex())
        if found is None or found.expires is None or found.fault(now) is not None:
            return True
        # The hub may have been started earlier with a longer lifetime.
        return found.expires - now < FRESH * self._ttl_s or found.expires - now > self._ttl_s

    async def replace(self, now: float) -> None:
        """Make the next token; call ``write`` once the ledger is saved. Raises LocalError."""
        secret: bytes = await self._in_thread(self._new_secret)
        self.token, self.stale = self._granted(secret, now), True

    async def write(self) -> Path | None:
        """Write the token file and return its path. Raises LocalError."""
        await self._in_thread(self.write_now)
        self.stale = False
        return self.file

    def write_now(self) -> None:
        """Write the token file. Blocks. Raises LocalError."""
        if self.file is not None:
            atomic_write(self.file, f"{self.token}\n".encode(), 0o600)

    def _recalled(self, now: float) -> JoinToken | None:
        """Return an earlier process's token, or None if there is none or the next one is due."""
        if not self._path.exists():
            return None
        trust = self._trust
        token = JoinToken(trust.run, secret_of(self._path), self._fingerprint or b"")
        ident = token.ident.hex()
        if trust.ledger.bound_own(now):
            logger.warning(
                "the hub's token never expired; it now expires in %.0f days, and the token file has a new one:"
                " see `token create --ttl never`",
                LEGACY_TTL_S / DAY_S,
            )
        elif ident not in trust.ledger.tokens and ident not in trust.evictions.tokens:
            # The ledger is lost, or older than the token. The file's age is the token's age.
            with explained("read", self._path):
                left_s = self._path.stat().st_mtime + self._ttl_s - now
            if 0 < left_s <= self._ttl_s:
                trust.ledger.grant(token.secret, "peer", now, ttl_s=left_s, own=True)
        self.token = token
        return None if self.is_due(now) else token

    def _new_secret(self) -> bytes:
        """Make a secret that is on disk when this returns. Blocks. Raises LocalError."""
        secret = secrets.token_bytes(SECRET_BYTES)
        atomic_write(self._path, secret, 0o600)
        return secret

    def _granted(self, secret: bytes, now: float) -> JoinToken:
        self._trust.ledger.grant(secret, "peer", now, ttl_s=self._ttl_s, own=True)
        return JoinToken(self._trust.run, secret, self._fingerprint or b"")
