"""Dialling: one control connection, or the stripes of a data link. All or nothing, within a deadline."""

from __future__ import annotations

import asyncio
import secrets
import ssl

from p2pcast.errors import P2PCastError, RemoteError, RetryableError
from p2pcast.transport.link import Link, LinkOwner
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Connection, Established, Event, Identity, Piece
from p2pcast.wire.messages import Body
from p2pcast.wire.state import Side

DIAL_S = 5.0
"""To connect and shake hands, all stripes together."""
MAX_EARLY = 16
"""Messages that may come before the other stripes are up."""


class _Handshake:
    """Owns a stripe until it is established."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Established] = asyncio.get_running_loop().create_future()
        self.early: list[Event] = []
        self.error: P2PCastError | None = None

    def on_established(self, stripe: Stripe, event: Established) -> None:
        if not self.done.done():
            self.done.set_result(event)

    def on_event(self, stripe: Stripe, event: Event) -> None:
        # The listener may speak right behind its READY, before the dialler has woken up.
        self.early.append(event)
        if len(self.early) > MAX_EARLY or isinstance(event, Piece):
            stripe.close(RemoteError("the listener speaks before it was spoken to"))

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        pass

    def on_writable(self, stripe: Stripe) -> None:
        pass

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self.error = error or RetryableError("the other side closed the connection during the handshake")
        if not self.done.done():
            self.done.set_exception(self.error)


async def _dial_stripe(
    host: str, port: int, identity: Identity, hello: Body, expect: bytes | None, tls: ssl.SSLContext | None
) -> tuple[Stripe, Established, _Handshake]:
    handshake = _Handshake()
    connection = Connection(Side.DIALER, identity, secrets.token_bytes(32), hello, expect)
    stripe = Stripe(connection, handshake)
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: stripe, host, port, ssl=tls, server_hostname=host if tls is not None else None
        )
    except OSError as error:
        raise RetryableError(f"cannot reach {host}:{port}: {error.strerror or error}") from None
    except ValueError:
        # A name that can't be looked up: a label too long, a NUL. It may have come from somebody else.
        raise RetryableError(f"cannot reach {host!r}: that is not a host name") from None
    try:
        return stripe, await handshake.done, handshake
    except BaseException:
        stripe.abort()
        raise


async def dial(
    owner: LinkOwner,
    host: str,
    port: int,
    identity: Identity,
    *,
    purpose: str,
    role: str,
    stripes: int = 1,
    expect: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = DIAL_S,
) -> Link:
    """A link to ``host:port`` with all its stripes up.

    Raises RetryableError (unreachable, too slow), RefusedError (token, run, identity), RemoteError (protocol).
    """
    link_id = secrets.token_bytes(16)
    hellos: list[Body] = [
        {"purpose": purpose, "role": role, "link": link_id, "stripe": number, "stripes": stripes} for number in range(stripes)
    ]
    # Neither TaskGroup nor gather: when a child fails at the moment when we are cancelled, they raise its error, and the caller
    # would go on as if nobody had told it to end.
    tasks = [
        asyncio.create_task(_dial_stripe(host, port, identity, hello, expect, tls), name=f"dial {host}:{port} {number}")
        for number, hello in enumerate(hellos)
    ]
    try:
        async with asyncio.timeout(timeout_s):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    except TimeoutError:
        await _abandon(tasks)
        raise RetryableError(f"no answer from {host}:{port} within {timeout_s:.0f} s") from None
    except BaseException:
        await _abandon(tasks)
        raise
    results = [task.result() for task in tasks]
    for stripe, _, handshake in results:
        if stripe.closed:
            await _abandon(tasks)
            raise handshake.error or RetryableError(f"{host}:{port} closed the connection at once")
    established = results[0][1]
    link = Link(owner, established.remote, f"{host}:{port}", stripes)
    for number, (stripe, _, _) in enumerate(results):
        link.add(stripe, number)
    for stripe, _, handshake in results:
        for event in handshake.early:
            if not link.closed:
                owner.on_link_event(link, stripe, event)
    return link


async def _abandon(tasks: list[asyncio.Task[tuple[Stripe, Established, _Handshake]]]) -> None:
    """End those that still dial, and close what the others brought up."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result()[0].abort()
