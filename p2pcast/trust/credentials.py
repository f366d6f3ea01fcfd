"""A node's credentials: its key, its certificate, and the authority's certificate.

Guarantees: key and certificates are replaced together. A node renews its certificate long before it expires, so a hub
outage shorter than the remaining lifetime has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from p2pcast.ground.errors import RefusedError, UntrustedError
from p2pcast.trust.certificates import Key, certified, check_issued, fingerprint, load, request, valid_at
from p2pcast.trust.dial_permissions import Certified
from p2pcast.trust.key_files import pem, read_pem, write_pem

RENEW_AFTER = 1 / 3
"""Share of a certificate's lifetime before renewal. The remaining two thirds bridge an outage of the hub."""


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
        """When the certificate expires, in Unix seconds."""
        return load(self.certificate).not_valid_after_utc.timestamp()

    @property
    def request(self) -> bytes:
        return request(self.key)

    def in_force(self, now: float) -> bool:
        """Whether the certificate is valid now. It is not if, for example, the issuer's clock was days ahead."""
        return valid_at(self.certificate, now)

    @property
    def due_at(self) -> float:
        """Time to ask for the next certificate, in Unix seconds."""
        return self.begun + (self.until - self.begun) * RENEW_AFTER

    def due(self, now: float) -> bool:
        """Whether it is time to ask for the next certificate."""
        return now >= self.due_at or not self.in_force(now)

    def renewed(self, certificate: bytes, now: float) -> Credentials:
        """Credentials with a newer certificate for the same key and holder. Raises RefusedError, RetryableError."""
        return received(self.key, certificate, self.authority, self.who, now)

    def pem(self) -> bytes:
        return pem(self.key, [self.certificate, self.authority])

    def save(self, path: Path) -> None:
        """Write to a file, mode 0600. Raises LocalError."""
        write_pem(path, self.key, [self.certificate, self.authority])

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """Read from a file. Raises LocalError."""
        key, (certificate, authority) = read_pem(path, 2)
        return cls(key, certificate, authority, path.stat().st_mtime)


def received(key: Key, certificate: bytes, authority: bytes, who: Certified, now: float) -> Credentials:
    """Credentials from a hub's answer, after verifying node, role and key. Raises RefusedError, RetryableError."""
    found = check_issued(certificate, authority, now)
    public = load(certificate).public_key()
    if found != who or public != key.public_key():
        raise RefusedError("the hub issued a certificate for another node, role or key")
    return Credentials(key, certificate, authority, now)


def pinned(leaf: bytes, authority: bytes, pin: bytes, run: bytes, now: float) -> Certified:
    """The identity of the hub on a first connection. Verifies that the token pins ``authority``, and that ``authority``
    issued ``leaf``, the certificate shown in TLS, to the run's hub. Raises RefusedError, RetryableError.
    """
    if fingerprint(authority) != pin:
        raise UntrustedError(
            "another run's hub answers at this address: the token pins another authority; check the address"
        )
    found = check_issued(leaf, authority, now)
    if found.role != "hub" or found.run != run:
        raise UntrustedError("another node of this run answers at this address, not the hub; check the address")
    return found
