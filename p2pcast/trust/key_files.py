"""A private key and its certificates in one PEM file, mode 0600. The file is replaced atomically, and refused when
other users can read it.
"""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import LocalError
from p2pcast.trust.certificates import Key, new_key

MAX_PEM_BYTES = 64 * 1024


def pem(key: Key, certificates: list[bytes]) -> bytes:
    """The contents of the file. ``certificates`` in DER."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + b"".join(
        x509.load_der_x509_certificate(c).public_bytes(serialization.Encoding.PEM) for c in certificates
    )


def write_pem(path: Path, key: Key, certificates: list[bytes]) -> None:
    """Write the file; durable on return. Raises LocalError."""
    atomic_write(path, pem(key, certificates), 0o600)


def read_pem(path: Path, count: int) -> tuple[Key, list[bytes]]:
    """The key and its ``count`` certificates (DER). Raises LocalError."""
    check_private(path)
    with explained("read", path), path.open("rb") as file:
        text = file.read(MAX_PEM_BYTES)
    try:
        key = serialization.load_pem_private_key(text, None)
        certificates = x509.load_pem_x509_certificates(text) if count else []
        found = [c.public_bytes(serialization.Encoding.DER) for c in certificates]
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _damaged(path) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or len(found) != count:
        raise _damaged(path)
    if found and x509.load_der_x509_certificate(found[0]).public_key() != key.public_key():
        raise _damaged(path)
    return key, found


def kept_key(path: Path) -> Key:
    """Return the key in the file, creating it durably if it is missing. Raises LocalError."""
    if not path.exists():
        write_pem(path, new_key(), [])
    return read_pem(path, 0)[0]


def check_private(path: Path) -> None:
    """Raise LocalError if other users may access the file."""
    with explained("read", path):
        if path.stat().st_mode & 0o077:
            raise LocalError(f"{path} can be read by others; run: chmod 600 {path}")


def _damaged(path: Path) -> LocalError:
    return LocalError(f"{path} is damaged: restore the file from a copy, or remove it for a new one")
