"""What can go wrong, in four kinds.

Each error knows the exit code of a command that ends with it and the code that it has on the wire. A message says what was wrong, where, and
what to do; it is fit to be shown to the remote side, so it never holds a secret or a traceback.
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_UNREACHABLE = 4


class P2PCastError(Exception):
    """Base of all errors that p2pcast raises on purpose."""

    exit_code = EXIT_FAILED
    wire_code = "failed"


class LocalError(P2PCastError):
    """Ours to mend: a full disk, a missing folder, a port in use."""

    wire_code = "internal"


class UsageError(LocalError):
    """The command line or the call makes no sense."""

    exit_code = EXIT_USAGE


class RemoteError(P2PCastError):
    """The other side broke the protocol; its connection is closed."""

    wire_code = "protocol"


class RefusedError(RemoteError):
    """One side will not deal with the other: bad token, other run, not admitted."""

    exit_code = EXIT_REFUSED
    wire_code = "refused"


class IncompatibleError(RefusedError):
    """The two sides have no protocol in common: one of them has to be updated."""


class UntrustedError(RefusedError):
    """The other side did not show to be who it should be. Somebody else may answer there by and by: no reason to give up who was in already."""


class IntegrityError(P2PCastError):
    """Bytes are not what they should be: wrong base, bad hash, bad signature, damaged file. Nothing was written."""

    exit_code = EXIT_REFUSED
    wire_code = "integrity"


class RetryableError(P2PCastError):
    """It may work later or elsewhere: unreachable, timed out, gone."""

    exit_code = EXIT_UNREACHABLE
    wire_code = "retry"
