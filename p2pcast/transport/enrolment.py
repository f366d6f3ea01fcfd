"""A node's first connection, on which it proves its join token and gets a certificate (docs/formats/wire-protocol.md,
section 2).
"""

from __future__ import annotations

import asyncio
import time

from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.transport.dial import DIAL_S, dial
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.stripe import Stripe
from p2pcast.trust.certificates import Key, request
from p2pcast.trust.credentials import Credentials, pinned, received
from p2pcast.trust.dial_permissions import ENROL, Certified
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import first_contact
from p2pcast.wire.connection import Event, Identity, Message
from p2pcast.wire.messages import Enrol, Issued

DOUBLINGS = 4
"""How often the wait for an answer doubles: a busy hub may take long, but a lost answer never comes."""


def patience_s(attempt: int) -> float:
    """Return the seconds to wait for the answer to the ``attempt``-th request in a row (the first is 1)."""
    return DIAL_S * (1 << min(attempt - 1, DOUBLINGS))


class _EnrolmentOwner(QuietOwner):
    """Owns the enrolment link until the hub's answer arrives."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if isinstance(event, Message) and isinstance(event.body, Issued) and not self.answer.done():
            self.answer.set_result(event.body.certificate)

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(
                error or RetryableError(f"{link.name} closed the connection without issuing a certificate")
            )


async def enrol(
    host: str, port: int, token: JoinToken, node: bytes, name: str, role: str, key: Key, *, timeout_s: float = DIAL_S
) -> Credentials:
    """Get a certificate for ``key``, for node id ``node`` in ``role``. The handshake proves the token's secret without
    sending it. It may be repeated: the hub answers the same node and key again, at no cost.

    Raises RetryableError (unreachable), RefusedError (token, node) and UntrustedError (not the token's hub).
    """
    authority = b""

    def verify_authority(leaf: bytes, shown: bytes) -> Certified:
        nonlocal authority
        hub = pinned(leaf, shown, token.authority, token.run, time.time())
        authority = shown
        return hub

    enrolment = _EnrolmentOwner()
    try:
        async with asyncio.timeout(timeout_s):
            link = await dial(
                enrolment,
                host,
                port,
                Identity(node, name, token, verify_authority=verify_authority),
                purpose=ENROL,
                role=role,
                tls=first_contact(),
                timeout_s=timeout_s,
            )
            try:
                link.send(Enrol(request(key)))
                certificate = await enrolment.answer
            finally:
                link.close()
    except TimeoutError:
        raise RetryableError(f"no certificate from {host}:{port} within {timeout_s:.0f} s") from None
    return received(key, certificate, authority, Certified(token.run, node, role), time.time())
