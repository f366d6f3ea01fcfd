"""Dials a link: all of its stripes or none, within a time limit.

A node may have several addresses, and a host name may resolve to several. Attempts at these addresses overlap, with
staggered starts (RFC 8305). Each attempt dials all stripes at one address. The first attempt that establishes the whole
link with the expected node wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from p2pcast.ground.addresses import Address, family_of, show_address
from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.process.background_tasks import report_bug
from p2pcast.transport.happy_eyeballs import race
from p2pcast.transport.link import Link, LinkOwner
from p2pcast.transport.rate_limit import RateLimit
from p2pcast.transport.socket_options import Sockets
from p2pcast.transport.stripe import DEFAULT, Stripe
from p2pcast.transport.tcp_info import read
from p2pcast.transport.tls_errors import explain
from p2pcast.wire.connection import Connection, ConnectionRequest, Established, Event, Identity, Piece
from p2pcast.wire.connection_state import Side

DIAL_S = 5.0
"""Time limit in seconds for connecting and for all of a link's handshakes, at all addresses together."""
PROBE_S = 3.0
"""Time limit of ``probe`` in seconds."""
NEXT_ADDRESS_S = 0.25
"""Head start of an address over the next one, in seconds (RFC 8305, section 5)."""
MAX_EARLY = 16
"""Most messages on a stripe before the whole link is established."""


class UnreachableError(RetryableError):
    """No node answers at the address, or a different one does."""


class _Handshake:
    """Owns a stripe until it is established."""

    def __init__(self, *, secure: bool) -> None:
        self._secure = secure
        self.done: asyncio.Future[Established] = asyncio.get_running_loop().create_future()
        self.early: list[Event] = []
        self.error: P2PCastError | None = None

    def on_established(self, stripe: Stripe, event: Established) -> None:
        if not self.done.done():
            self.done.set_result(event)

    def on_event(self, stripe: Stripe, event: Event) -> None:
        # The listener may send messages right after its READY, before the dialling task runs again.
        self.early.append(event)
        if len(self.early) > MAX_EARLY or isinstance(event, Piece):
            stripe.close(RemoteError("the listener sent pieces or too many messages before the link was up"))

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        pass

    def on_writable(self, stripe: Stripe) -> None:
        pass

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self.error = error or RetryableError(
            "the other side closed the connection during the handshake"
            + (": perhaps it does not accept this node's certificate" if self._secure else "")
        )
        if not self.done.done():
            self.done.set_exception(self.error)
            # Mark the exception as retrieved: the dialling task may already have been cancelled.
            self.done.exception()


Stripes = int | Callable[[float], int]
"""A number of stripes, or a function that computes it from the round-trip time in seconds. The first connection
measures the round-trip time; then the other stripes are dialled.
"""

_Up = tuple[Stripe, Established, _Handshake]
_Ups = list[_Up]


async def _dial_stripe(
    host: str,
    port: int,
    identity: Identity,
    request: ConnectionRequest,
    expect: bytes | None,
    tls: ssl.SSLContext | None,
    sockets: Sockets = DEFAULT,
    connected: list[socket.socket] | None = None,
    on_connect: Callable[[], None] = lambda: None,
) -> _Up:
    """Establish one stripe. ``connected``: connected sockets; if there are any, the stripe takes one."""
    handshake = _Handshake(secure=tls is not None)
    stripe = Stripe(
        Connection(Side.DIALER, identity, secrets.token_bytes(32), request, expect), handshake, sockets=sockets
    )
    established: Established | None = None
    try:
        sock = connected.pop() if connected else await _connect((host, port), on_connect)
        # From here on the event loop owns the socket and closes it.
        await asyncio.get_running_loop().create_connection(
            lambda: stripe, sock=sock, ssl=tls, server_hostname=host if tls is not None else None
        )
        established = await handshake.done
    except ssl.SSLError as error:
        raise explain(error, show_address(host, port)) from None
    except Exception as error:  # noqa: BLE001 - one peer's address must not end a daemon
        raise _unreachable((host, port), error) from None
    finally:
        if established is None:
            stripe.abort()
    return stripe, established, handshake


async def dial(
    owner: LinkOwner,
    host: str,
    port: int,
    identity: Identity,
    *,
    purpose: str,
    role: str,
    stripes: Stripes = 1,
    expect: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    sockets: Sockets = DEFAULT,
    timeout_s: float = DIAL_S,
) -> Link:
    """Establish a link to ``host:port``. See ``dial_any``."""
    return await dial_any(
        owner,
        [(host, port)],
        identity,
        purpose=purpose,
        role=role,
        stripes=stripes,
        expect=expect,
        tls=tls,
        sockets=sockets,
        timeout_s=timeout_s,
    )


async def dial_any(
    owner: LinkOwner,
    addresses: Sequence[Address],
    identity: Identity,
    *,
    purpose: str,
    role: str,
    stripes: Stripes = 1,
    expect: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    sockets: Sockets = DEFAULT,
    timeout_s: float = DIAL_S,
    made: Callable[[Link], None] | None = None,
    on_connect: Callable[[], None] = lambda: None,
) -> Link:
    """Establish a link, with all its stripes, to the node at ``addresses``. ``expect``: the node's id. ``made`` is
    called with the link before the owner gets its first event. ``on_connect`` is called for each TCP connection.

    Raises UnreachableError (no node answers, or a different one), RetryableError (not now, too slow), RefusedError
    (token, run, identity) and RemoteError (protocol).
    """
    accepted = False

    def note() -> None:
        nonlocal accepted
        accepted = True
        on_connect()

    shown = ", ".join(show_address(*address) for address in addresses)
    errors: list[P2PCastError]
    try:
        async with asyncio.timeout(timeout_s):
            found, errors = await resolve(addresses)
            attempts: list[Callable[[], Coroutine[Any, Any, _Ups]]] = [
                partial(_attempt, where, identity, purpose, role, stripes, expect, tls, sockets, note)
                for where in found
            ]
            outcome = await race(attempts, NEXT_ADDRESS_S, _abort_all)
    except TimeoutError:
        raise (RetryableError if accepted else UnreachableError)(
            f"no answer from {shown} within {timeout_s:.0f} s"
        ) from None
    ups, failures = outcome
    if ups is None:
        raise _failure(shown, [*errors, *failures], expect)
    stripe = ups[0][0]
    name, reserve = show_address(*stripe.remote_address), not isinstance(stripes, int)
    link = Link(owner, ups[0][1].remote, name, len(ups), dialled=True, reserve=reserve)
    if purpose != "control":
        link.rate_limit = RateLimit(asyncio.get_running_loop().time())
    for number, (stripe, _, _) in enumerate(ups):
        link.add(stripe, number)
    if made is not None:
        made(link)
    for stripe, _, handshake in ups:
        for event in handshake.early:
            link.on_event(stripe, event)
    return link


async def probe(address: Address, identity: Identity, expect: bytes, tls: ssl.SSLContext | None = None) -> bool | None:
    """Whether the node ``expect`` answers at an address. Returns None if a TCP connection was accepted, but no
    handshake completed within PROBE_S.
    """
    request = ConnectionRequest("data", "child", secrets.token_bytes(16), stripe=0, stripes=1)
    accepted: list[Address] = []
    try:
        async with asyncio.timeout(PROBE_S):
            for where in (await resolve([address]))[0]:
                with contextlib.suppress(P2PCastError):
                    note = partial(accepted.append, where)
                    stripe, _, _ = await _dial_stripe(*where, identity, request, expect, tls, on_connect=note)
                    stripe.abort()
                    return True
    except TimeoutError:
        return None if accepted else False
    return False


async def resolve(addresses: Sequence[Address]) -> tuple[list[Address], list[P2PCastError]]:
    """Return IP addresses in the order in which to try them, and the errors for names that do not resolve. A name's
    addresses alternate between families, in this machine's order of preference.
    """
    found: dict[Address, None] = {}
    errors: list[P2PCastError] = []
    for host, port in addresses:
        if family_of(host) is not None:
            found[host, port] = None
            continue
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        except OSError as error:
            errors.append(UnreachableError(f"cannot reach {show_address(host, port)}: {error.strerror or error}"))
            continue
        except Exception as error:  # noqa: BLE001 - an invalid name from a remote node must not end a daemon
            _report_if_bug(host, error)
            errors.append(UnreachableError(f"cannot reach {host!r}: it is not a valid host name"))
            continue
        hosts = [str(where[0]) for *_, where in infos]
        first = [h for h in hosts if family_of(h) == family_of(hosts[0])]
        other = [h for h in hosts if h not in first]
        found |= {(h, port): None for h in chain.from_iterable(zip_longest(first, other)) if h is not None}
    return list(found), errors


async def _attempt(
    where: Address,
    identity: Identity,
    purpose: str,
    role: str,
    wanted: Stripes,
    expect: bytes | None,
    tls: ssl.SSLContext | None,
    sockets: Sockets,
    on_connect: Callable[[], None],
) -> _Ups:
    """Establish all stripes of a link at one address."""
    connected: list[socket.socket] = []
    stripes = wanted if isinstance(wanted, int) else await _stripes_by_rtt(where, wanted, connected, on_connect)
    link = secrets.token_bytes(16)
    tasks = [
        asyncio.create_task(
            _dial_stripe(
                *where,
                identity,
                ConnectionRequest(purpose, role, link, number, stripes),
                expect,
                tls,
                sockets,
                None if number else connected,
                on_connect,
            ),
            name=f"dial {show_address(*where)} {number}",
        )
        for number in range(stripes)
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    except BaseException:
        await _abandon(tasks)
        raise
    finally:
        for sock in connected:
            sock.close()
    results = [task.result() for task in tasks]
    for stripe, _, handshake in results:
        if stripe.closed:
            _abort_all(results)
            raise handshake.error or RetryableError(f"{show_address(*where)} closed a connection during dialling")
    return results


async def _stripes_by_rtt(
    where: Address, wanted: Callable[[float], int], connected: list[socket.socket], on_connect: Callable[[], None]
) -> int:
    """Open a connection, append it to ``connected``, and return the number of stripes for its round-trip time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        sock = await _connect(where, on_connect)
    except Exception as error:  # noqa: BLE001 - as in _dial_stripe
        raise _unreachable(where, error) from None
    try:
        info = read(sock)
        count = wanted(loop.time() - began if info is None else info.rtt_s)
    except BaseException:
        sock.close()
        raise
    connected.append(sock)
    return count


async def _connect(where: Address, on_connect: Callable[[], None]) -> socket.socket:
    """Open a TCP connection, and call ``on_connect`` once it is up. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if family_of(where[0]) == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    on_connect()
    return sock


def _unreachable(where: Address, error: Exception) -> P2PCastError:
    """Convert ``error`` to a P2PCastError for this address."""
    if isinstance(error, P2PCastError):
        return error
    _report_if_bug(show_address(*where), error)
    errno = getattr(error, "errno", None)
    why = error if errno is None else os.strerror(errno)
    return UnreachableError(f"cannot reach {show_address(*where)}: {why}")


def _report_if_bug(where: str, error: Exception) -> None:
    """Report ``error`` if it is a bug. An invalid address from a remote node (a label too long, a NUL) is not one."""
    if not isinstance(error, OSError | ValueError | OverflowError):
        report_bug(f"dialling {where}", error)


async def _abandon(tasks: list[asyncio.Task[_Up]]) -> None:
    """Cancel the tasks that are still dialling, and close the other tasks' stripes."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result()[0].abort()


def _abort_all(ups: _Ups) -> None:
    for stripe, _, _ in ups:
        stripe.abort()


def _failure(shown: str, errors: list[P2PCastError], expect: bytes | None) -> P2PCastError:
    """Return the error to raise for the errors at several addresses: the first from the expected node. With ``expect``,
    a refusal may come from a different node at one of the addresses.
    """
    not_expected = UnreachableError if expect is None else (UnreachableError, RefusedError)
    answers = [error for error in errors if not isinstance(error, not_expected)]
    if answers or len(errors) == 1:
        return (answers or errors)[0]
    if not errors:
        return UnreachableError("no address is known")
    return UnreachableError(f"cannot reach {shown}: {'; '.join(map(str, errors))}"[:500])
