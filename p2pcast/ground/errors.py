"""The errors that p2pcast raises: local, remote, integrity, retryable and unverified.

Each error has an exit code for commands and a code for the wire. A message says what was wrong, where, and what to do.
Messages may be sent to the other side, so they never contain secrets or tracebacks.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_UNREACHABLE = 4
EXIT_UNVERIFIED = 5


class P2PCastError(Exception):
    """Base of all errors that p2pcast raises on purpose."""

    exit_code = EXIT_FAILED
    wire_code = "failed"


class LocalError(P2PCastError):
    """A problem on this machine that the user can fix: a full disk, a missing folder, a port in use."""

    wire_code = "internal"


class UsageError(LocalError):
    """The command line, or a call's arguments, are invalid."""

    exit_code = EXIT_USAGE


class RemoteError(P2PCastError):
    """The other side violated the protocol; the connection is closed."""

    wire_code = "protocol"


class RefusedError(RemoteError):
    """One side refuses the other: bad token, another run, not admitted."""

    exit_code = EXIT_REFUSED
    wire_code = "refused"


class IncompatibleError(RefusedError):
    """The two sides have no protocol version in common, so one of them must be updated."""


class UntrustedError(RefusedError):
    """Peer authentication failed. A different node may be using the address for now, so a node that has been admitted
    before keeps retrying.
    """


class IntegrityError(P2PCastError):
    """Bytes are wrong: wrong base, bad hash, bad signature, damaged file. Nothing was written."""

    exit_code = EXIT_REFUSED
    wire_code = "integrity"


class RetryableError(P2PCastError):
    """The operation may succeed later or elsewhere: unreachable, timed out, gone."""

    exit_code = EXIT_UNREACHABLE
    wire_code = "retry"


class UnverifiedError(P2PCastError):
    """No byte is known to be wrong, but some bytes could not be compared."""

    exit_code = EXIT_UNVERIFIED
    wire_code = "unverified"
