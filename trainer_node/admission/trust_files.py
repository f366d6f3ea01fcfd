"""Reads the hub's secrets and its token ledger from the state folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Container
from pathlib import Path

from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import LocalError
from p2pcast.trust.join_token import SECRET_BYTES
from p2pcast.trust.key_files import check_private
from p2pcast.trust.token_register import TokenRegister

REMEDY = "restore it from a copy, or remove it (then tokens are lost; peers stay in the run, and bring back evictions)"


def read_ledger(path: Path, evicted: Container[bytes]) -> TokenRegister:
    """Read the token ledger; an empty one if the file is missing. Raises LocalError."""
    if not path.exists():
        return TokenRegister(evicted)
    check_private(path)
    try:
        with explained("read", path):
            document = json.loads(path.read_text())
        return TokenRegister.of(document, evicted)
    except (ValueError, TypeError) as error:
        raise LocalError(f"{path} is damaged: {REMEDY}") from error
    except LocalError as error:
        raise LocalError(f"{path}: {error}; {REMEDY}") from error


def secret_of(path: Path) -> bytes:
    """Return the secret in a file, which is created if it is missing. Raises LocalError."""
    if not path.exists():
        secret = secrets.token_bytes(SECRET_BYTES)
        atomic_write(path, secret, 0o600)
        return secret
    check_private(path)
    with explained("read", path):
        secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise LocalError(
            f"{path} is damaged: restore it from a copy, or remove it (then every peer needs the new token)"
        )
    return secret
