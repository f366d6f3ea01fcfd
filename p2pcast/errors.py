"""Errors that p2pcast raises on purpose, under the name that programs import: see ``p2pcast.ground.errors``."""

from p2pcast.ground.errors import (
    IncompatibleError,
    IntegrityError,
    LocalError,
    P2PCastError,
    RefusedError,
    RemoteError,
    RetryableError,
    UntrustedError,
    UnverifiedError,
    UsageError,
)

__all__ = [
    "IncompatibleError",
    "IntegrityError",
    "LocalError",
    "P2PCastError",
    "RefusedError",
    "RemoteError",
    "RetryableError",
    "UntrustedError",
    "UnverifiedError",
    "UsageError",
]
