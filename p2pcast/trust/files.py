"""Keys on disk: a private key and its certificates in one PEM file, replaced whole, mode 0600, refused when others can read it."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2pcast.errors import LocalError
from p2pcast.store.files import atomic_write, explained
from p2pcast.trust.certificates import Key

MAX_PEM_BYTES = 64 * 1024


def pem(key: Key, certificates: list[bytes]) -> bytes:
    """``certificates`` in DER."""
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + b"".join(x509.load_der_x509_certificate(c).public_bytes(serialization.Encoding.PEM) for c in certificates)


def write_pem(path: Path, key: Key, certificates: list[bytes]) -> None:
    """Durable when it returns. Raises LocalError."""
    atomic_write(path, pem(key, certificates), 0o600)


def read_pem(path: Path, count: int) -> tuple[Key, list[bytes]]:
    """The key and its ``count`` certificates (DER). Raises LocalError."""
    check_private(path)
    with explained("read", path), path.open("rb") as file:
        text = file.read(MAX_PEM_BYTES)
    try:
        key = serialization.load_pem_private_key(text, None)
        found = [c.public_bytes(serialization.Encoding.DER) for c in x509.load_pem_x509_certificates(text)]
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _damaged(path) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or len(found) != count:
        raise _damaged(path)
    if x509.load_der_x509_certificate(found[0]).public_key() != key.public_key():
        raise _damaged(path)
    return key, found


def check_private(path: Path) -> None:
    """Raises LocalError when others may read the file."""
    with explained("read", path):
        if path.stat().st_mode & 0o077:
            raise LocalError(f"{path} can be read by others; run: chmod 600 {path}")


def _damaged(path: Path) -> LocalError:
    return LocalError(f"{path} is damaged: restore it from a copy, or remove it to have a new one made")
