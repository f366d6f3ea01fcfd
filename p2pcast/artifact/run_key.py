"""The run's key, with which a hub signs records (``p2pcast.artifact.signed_records``), and its file.

Guarantees: a key file is created once, complete, and readable only by its user. A file that is damaged or that other
users can read raises an error; it is never replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pcast.artifact.signed_records import KEY_BYTES
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import LocalError


class RunKey:
    """The run's Ed25519 key. Whoever has it can publish versions."""

    def __init__(self, secret: bytes) -> None:
        """Create the key from its 32 secret bytes."""
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"RunKey(public={self.public.hex()})"

    @classmethod
    def generate(cls) -> RunKey:
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load_or_create(cls, path: Path | str) -> RunKey:
        """Return the key in the file at ``path`` (32 bytes, mode 0600); create it if missing. Raises LocalError."""
        path = Path(path)
        with explained("read", path):
            if not path.exists():
                try:
                    atomic_write(path, os.urandom(KEY_BYTES), 0o600, replace=False)
                except FileExistsError:
                    pass  # another process created the file first; its key is the run's
            if path.stat().st_mode & 0o077:
                raise LocalError(f"run key {path} can be read by others; run: chmod 600 {path}")
            with path.open("rb") as file:
                secret = file.read(KEY_BYTES + 1)
        if len(secret) != KEY_BYTES:
            raise LocalError(
                f"run key {path} is not {KEY_BYTES} bytes: restore it from a copy, or remove it to start a new run"
            )
        return cls(secret)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)
