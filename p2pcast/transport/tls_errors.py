"""Converts TLS results: passes the other side's certificate on, and turns errors into P2PCastErrors."""

from __future__ import annotations

import ssl

from p2pcast.ground.errors import P2PCastError, RetryableError, UntrustedError
from p2pcast.trust.server_role import WrongServerError
from p2pcast.wire.connection import Connection

_NOT_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "PACKET_LENGTH_TOO_LONG"}
)


def record_certificate(connection: Connection, tls: ssl.SSLObject | ssl.SSLSocket) -> None:
    """Pass the other side's certificate to the wire connection. Raises RefusedError."""
    connection.secured(tls.getpeercert(binary_form=True), proven=tls.context.verify_mode != ssl.CERT_NONE)


def explain(error: ssl.SSLError, where: str, not_tls: str = "was it started with --plaintext?") -> P2PCastError:
    """Convert a TLS error to a P2PCastError. ``where``: the other side's address, for the message. ``not_tls``: advice
    in case the server does not use TLS.
    """
    if isinstance(error, WrongServerError):
        return UntrustedError(f"{where}: {error.verify_message}; check the address")
    if isinstance(error, ssl.SSLCertVerificationError):
        return UntrustedError(
            f"{where}: the certificate is from another run, is not a server's, or is not valid now "
            f"({error.verify_message})"
        )
    reason = error.reason or ""
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return UntrustedError(f"{where} does not accept this node's certificate ({reason.lower().replace('_', ' ')})")
    if reason in _NOT_TLS:
        return RetryableError(f"{where} does not speak TLS: {not_tls}")
    return RetryableError(f"{where}: TLS failed: {reason.lower().replace('_', ' ') or error}")
