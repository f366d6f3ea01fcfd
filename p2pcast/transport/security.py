"""What TLS says of a connection, in our words."""

from __future__ import annotations

import ssl

from p2pcast.errors import P2PCastError, RetryableError, UntrustedError
from p2pcast.wire.connection import Connection

_NOT_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "PACKET_LENGTH_TOO_LONG"}
)


def secure(connection: Connection, tls: ssl.SSLObject | ssl.SSLSocket) -> None:
    """Tells the connection who is at the other end. Raises RefusedError."""
    connection.secured(tls.getpeercert(binary_form=True), proven=tls.context.verify_mode != ssl.CERT_NONE)


def explain(error: ssl.SSLError, where: str) -> P2PCastError:
    """``where``: the other side, for the message."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return UntrustedError(f"{where}: its certificate is not one of this run's, or not in force ({error.verify_message})")
    reason = error.reason or ""
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return UntrustedError(f"{where} does not accept this node's certificate ({reason.lower().replace('_', ' ')})")
    if reason in _NOT_TLS:
        return RetryableError(f"{where} does not speak TLS: was it started with --plaintext?")
    return RetryableError(f"{where}: TLS failed: {reason.lower().replace('_', ' ') or error}")
