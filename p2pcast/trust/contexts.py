"""TLS contexts of a node: mutual TLS 1.3 under the run's own authority and no other.

Promises: both ends show a certificate of the run's authority, or there is no link (but for a hub's listener, which lets in who has none yet: what such a connection may do is
``wire.connection``'s to decide); a renewed certificate is shown from the next connection on; keys pass through memory, never through another file.
"""

from __future__ import annotations

import os
import ssl

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from p2pcast.trust.credentials import Credentials


class Tls:
    """``server`` for connections that come in, ``client`` for those that go out."""

    def __init__(self, credentials: Credentials | None = None, *, strangers: bool = False) -> None:
        """Without credentials nobody is let in or out, until ``use``. ``strangers``: whoever has no certificate may connect too, to ask for one."""
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL if strangers else ssl.CERT_REQUIRED)
        # A session that is taken up again would be a certificate that is not looked at again.
        self.server.num_tickets = 0
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)
        self.credentials: Credentials | None = None
        if credentials is not None:
            self.use(credentials)

    def use(self, credentials: Credentials) -> None:
        """From the next connection on. Always of the same authority."""
        if self.credentials is None:
            authority = x509.load_der_x509_certificate(credentials.authority)
            text = authority.public_bytes(serialization.Encoding.PEM).decode()
            for context in (self.server, self.client):
                context.load_verify_locations(cadata=text)
        self.credentials = credentials
        fd = os.memfd_create("p2pcast", os.MFD_CLOEXEC)
        try:
            os.write(fd, credentials.pem())
            for context in (self.server, self.client):
                context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)


def first_contact() -> ssl.SSLContext:
    """For a node without a certificate. TLS looks at nobody's certificate here: the handshake does, by what the token pins."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_NONE)


def _context(protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nodes go by the name in their certificate, wherever they are.
    context.check_hostname = False
    context.verify_mode = verify
    return context
