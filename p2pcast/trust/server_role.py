"""TLS contexts for clients that connect only to servers with one role.

The run's authority certifies all nodes of the run, so a valid certificate does not tell a ledger from a peer. Promise:
the handshake fails before the client sends a byte of its own unless the server's certificate names the run and the
role. This holds for asyncio, uvloop and blocking sockets.
"""

from __future__ import annotations

import ssl

from p2pcast.ground.errors import RefusedError
from p2pcast.trust.certificates import certified
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Role
from p2pcast.trust.tls_contexts import require, show, trust


class WrongServerError(ssl.SSLCertVerificationError):
    """The server's certificate is valid, but for the wrong role or run. ``verify_message`` says which."""

    def __init__(self, text: str) -> None:
        super().__init__(1, text)
        self.verify_message = text


class _CheckedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self)


class _CheckedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self)


class ServerRoleContext(ssl.SSLContext):
    """A client's context; ``client_context`` makes it."""

    sslobject_class = _CheckedObject
    sslsocket_class = _CheckedSocket
    run: bytes
    role: Role


def client_context(credentials: Credentials, role: Role) -> ssl.SSLContext:
    """A context that shows ``credentials`` and accepts servers of ``role`` of the same run."""
    context = ServerRoleContext(ssl.PROTOCOL_TLS_CLIENT)
    require(context, ssl.CERT_REQUIRED)
    context.run, context.role = credentials.who.run, role
    trust(credentials.authority, context)
    show(credentials, context)
    return context


def _check(tls: ssl.SSLObject | ssl.SSLSocket) -> None:
    """Raises WrongServerError."""
    context = tls.context
    assert isinstance(context, ServerRoleContext)
    try:
        found = certified(tls.getpeercert(binary_form=True) or b"")
    except RefusedError as error:
        raise WrongServerError(str(error)) from None
    if found.run != context.run:
        raise WrongServerError("a node of another run answers at this address")
    if found.role != context.role:
        raise WrongServerError(f"a {found.role} answers at this address, not a {context.role} of this run")
