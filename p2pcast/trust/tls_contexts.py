"""TLS contexts of a node: mutual TLS 1.3 with the run's own authority as the only one.

Promises: both sides present a certificate of the run's authority, or there is no link. One exception: a hub's listener
accepts a client without a certificate, and ``wire.connection`` restricts such a connection to enrolment. A renewed
certificate is used from the next connection on. Private keys pass through memory only, never through another file.
"""

from __future__ import annotations

import os
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from p2pcast.trust.credentials import Credentials


class Tls:
    """``server``: the context for accepted connections; ``client``: the context for dialled connections."""

    def __init__(self, credentials: Credentials | None = None, *, strangers: bool = False) -> None:
        """Without credentials, all handshakes fail until ``use``. ``strangers``: accept clients without a certificate,
        for enrolment.
        """
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED)
        # No session resumption: a resumed session would skip the verification of the certificate.
        self.server.num_tickets = 0
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)
        self.credentials: Credentials | None = None
        if credentials is not None:
            self.use(credentials)

    def use(self, credentials: Credentials) -> None:
        """Use these credentials from the next connection on. Their authority must not change."""
        if self.credentials is None:
            trust(credentials.authority, self.server, self.client)
        self.credentials = credentials
        show(credentials, self.server, self.client)


def trust(authority: bytes, *contexts: ssl.SSLContext) -> None:
    """Accept certificates that ``authority``, a certificate in DER, has issued."""
    text = x509.load_der_x509_certificate(authority).public_bytes(serialization.Encoding.PEM).decode()
    for context in contexts:
        context.load_verify_locations(cadata=text)


def show(credentials: Credentials, *contexts: ssl.SSLContext) -> None:
    """Show this certificate from the next connection on."""
    fd = os.memfd_create("p2pcast", os.MFD_CLOEXEC)
    try:
        os.write(fd, credentials.pem())
        for context in contexts:
            context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def first_contact() -> ssl.SSLContext:
    """The client context of a node without a certificate. TLS verifies nothing; p2pcast's handshake verifies the hub's
    certificate by the token's pin.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_NONE)


def _context(protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    require(context, verify)
    return context


def require(context: ssl.SSLContext, verify: ssl.VerifyMode) -> None:
    """Apply this run's rules to a new context."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A node's identity is the URI in its certificate, not its host name.
    context.check_hostname = False
    context.verify_mode = verify
