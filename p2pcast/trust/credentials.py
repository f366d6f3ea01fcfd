"""What a node shows of itself: its key, the certificate for it, and the authority that issued both its own and everybody else's.

Promises: key and certificates are replaced together; a certificate is asked for anew long before it ends, so an outage of the hub that is shorter than the rest of
its life costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from p2pcast.errors import RefusedError, UntrustedError
from p2pcast.trust.certificates import Key, certified, check_issued, fingerprint, load, request
from p2pcast.trust.files import pem, read_pem, write_pem
from p2pcast.trust.roles import Certified

RENEW_AFTER = 1 / 3
"""Of a certificate's life: two thirds are left to outlast a hub that is away."""


@dataclass(frozen=True)
class Credentials:
    """``certificate`` and ``authority`` in DER; ``begun`` in Unix seconds: when it was received."""

    key: Key
    certificate: bytes
    authority: bytes
    begun: float

    def __repr__(self) -> str:
        return f"Credentials({self.who.role} {self.who.node.hex()})"

    @cached_property
    def who(self) -> Certified:
        return certified(self.certificate)

    @cached_property
    def until(self) -> float:
        """In Unix seconds."""
        return load(self.certificate).not_valid_after_utc.timestamp()

    @property
    def request(self) -> bytes:
        return request(self.key)

    def expired(self, now: float) -> bool:
        return now >= self.until

    def due(self, now: float) -> bool:
        """Whether it is time to ask for the next certificate."""
        return now >= self.begun + (self.until - self.begun) * RENEW_AFTER

    def renewed(self, certificate: bytes, now: float) -> Credentials:
        """With a newer certificate for the same key and holder. Raises RefusedError."""
        return received(self.key, certificate, self.authority, self.who, now)

    def pem(self) -> bytes:
        return pem(self.key, [self.certificate, self.authority])

    def save(self, path: Path) -> None:
        """Raises LocalError."""
        write_pem(path, self.key, [self.certificate, self.authority])

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """Raises LocalError."""
        key, (certificate, authority) = read_pem(path, 2)
        return cls(key, certificate, authority, path.stat().st_mtime)


def received(key: Key, certificate: bytes, authority: bytes, who: Certified, now: float) -> Credentials:
    """What a hub has issued, once it is what was asked for. Raises RefusedError."""
    found = check_issued(certificate, authority, now)
    public = load(certificate).public_key()
    if found != who or public != key.public_key():
        raise RefusedError("the hub issued a certificate for another node, role or key")
    return Credentials(key, certificate, authority, now)


def pinned(leaf: bytes, authority: bytes, pin: bytes, run: bytes, now: float) -> Certified:
    """The hub that a first connection has reached: ``authority`` is the one that the token pins, and ``leaf``, which TLS has shown the other side to hold, its
    certificate for the run's hub. Raises RefusedError."""
    if fingerprint(authority) != pin:
        raise UntrustedError("another run's hub answers at this address: its authority is not the one that the token names")
    found = check_issued(leaf, authority, now)
    if found.role != "hub" or found.run != run:
        raise UntrustedError("a node of this run answers at this address, but not its hub")
    return found
