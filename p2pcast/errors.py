"""The errors that p2pcast raises on purpose, for programs to import. ``p2pcast.ground.errors`` defines them."""

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
