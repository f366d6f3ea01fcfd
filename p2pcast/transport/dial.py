"""Dialling: one control connection, or the stripes of a data link. All or nothing, within a deadline.

A node may have several addresses, and a name may stand for several. They are tried one beside the other, each with a head start over the next (RFC 8305), all
stripes at one of them: the first address at which the whole link is up, with the node that was expected, is taken.
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

from p2pcast.addresses import Address, family_of, show_address
from p2pcast.errors import P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.tasks import unforeseen
from p2pcast.transport.link import Link, LinkOwner
from p2pcast.transport.race import race
from p2pcast.transport.ration import Ration
from p2pcast.transport.security import explain
from p2pcast.transport.sockets import Sockets
from p2pcast.transport.stripe import DEFAULT, Stripe
from p2pcast.transport.tcp_info import read
from p2pcast.wire.connection import Connection, Established, Event, Identity, Piece
from p2pcast.wire.messages import Body
from p2pcast.wire.state import Side

DIAL_S = 5.0
"""To connect and shake hands, all stripes together, at whichever address."""
PROBE_S = 3.0
"""To find out whether somebody answers."""
NEXT_ADDRESS_S = 0.25
"""Head start of an address over the next one (RFC 8305, section 5)."""
MAX_EARLY = 16
"""Messages that may come before the other stripes are up."""


class UnreachableError(RetryableError):
    """Nobody is there, or somebody else."""


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
        # The listener may speak right behind its READY, before the dialler has woken up.
        self.early.append(event)
        if len(self.early) > MAX_EARLY or isinstance(event, Piece):
            stripe.close(RemoteError("the listener speaks before it was spoken to"))

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
            # Nobody may be waiting any more: then it is no error that was overlooked.
            self.done.exception()


Stripes = int | Callable[[float], int]
"""A number, or what says it for a round trip in seconds: that of the first connection, one round trip before the others are dialled."""

_Up = tuple[Stripe, Established, _Handshake]
_Ups = list[_Up]


async def _dial_stripe(
    host: str,
    port: int,
    identity: Identity,
    hello: Body,
    expect: bytes | None,
    tls: ssl.SSLContext | None,
    sockets: Sockets = DEFAULT,
    connected: list[socket.socket] | None = None,
    stands: Callable[[], None] = lambda: None,
) -> _Up:
    """``connected``: a socket to be taken out of it and used, if there is one."""
    sock = connected.pop() if connected else None
    handshake = _Handshake(secure=tls is not None)
    connection = Connection(Side.DIALER, identity, secrets.token_bytes(32), hello, expect)
    stripe = Stripe(connection, handshake, sockets=sockets)
    try:
        if sock is None:
            sock = await _connect((host, port), stands)
        await asyncio.get_running_loop().create_connection(
            lambda: stripe, sock=sock, ssl=tls, server_hostname=host if tls is not None else None
        )
    except ssl.SSLError as error:
        raise explain(error, show_address(host, port)) from None
    except Exception as error:  # noqa: BLE001 - one peer's address must not end a daemon
        raise _unreachable((host, port), error) from None
    finally:
        if sock is not None and not stripe.made:
            sock.close()
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
    stripes: Stripes = 1,
    expect: bytes | None = None,
    tls: ssl.SSLContext | None = None,
    sockets: Sockets = DEFAULT,
    timeout_s: float = DIAL_S,
) -> Link:
    """A link to ``host:port`` with all its stripes up. See ``dial_any``."""
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
    stands: Callable[[], None] = lambda: None,
) -> Link:
    """A link to the node that has these addresses, with all its stripes up. ``made`` is told of it before its owner hears anything, ``stands`` of every
    connection that somebody has accepted.

    Raises UnreachableError (nobody is there, or another node), RetryableError (not now, too slow), RefusedError (token, run, identity), RemoteError (protocol).
    """
    accepted = False

    def note() -> None:
        nonlocal accepted
        accepted = True
        stands()

    shown = ", ".join(show_address(*address) for address in addresses)
    hello = {"purpose": purpose, "role": role}
    errors: list[P2PCastError]
    try:
        async with asyncio.timeout(timeout_s):
            found, errors = await resolve(addresses)
            attempts: list[Callable[[], Coroutine[Any, Any, _Ups]]] = [
                partial(_attempt, where, identity, hello, stripes, expect, tls, sockets, note) for where in found
            ]
            outcome = await race(attempts, NEXT_ADDRESS_S, _drop)
    except TimeoutError:
        raise (RetryableError if accepted else UnreachableError)(f"no answer from {shown} within {timeout_s:.0f} s") from None
    ups, failures = outcome
    if ups is None:
        raise _failure(shown, [*errors, *failures], expect)
    stripe = ups[0][0]
    name, reserve = show_address(*stripe.remote_address), not isinstance(stripes, int)
    link = Link(owner, ups[0][1].remote, name, len(ups), dialled=True, reserve=reserve)
    if purpose != "control":
        link.ration = Ration(asyncio.get_running_loop().time())
    for number, (stripe, _, _) in enumerate(ups):
        link.add(stripe, number)
    if made is not None:
        made(link)
    for stripe, _, handshake in ups:
        for event in handshake.early:
            link.on_event(stripe, event)
    return link


async def probe(address: Address, identity: Identity, expect: bytes, tls: ssl.SSLContext | None = None) -> bool | None:
    """Whether this node answers at an address: a handshake, and no more. None: somebody is there, and says nothing."""
    hello = {"purpose": "data", "role": "child", "link": secrets.token_bytes(16), "stripe": 0, "stripes": 1}
    stood: list[Address] = []
    try:
        async with asyncio.timeout(PROBE_S):
            for where in (await resolve([address]))[0]:
                with contextlib.suppress(P2PCastError):
                    (await _dial_stripe(*where, identity, hello, expect, tls, stands=partial(stood.append, where)))[0].abort()
                    return True
    except TimeoutError:
        return None if stood else False
    return False


async def resolve(addresses: Sequence[Address]) -> tuple[list[Address], list[P2PCastError]]:
    """IP addresses in the order in which to try them: as given, and those of a name by turns of the families, in the order that this machine prefers."""
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
        except Exception as error:  # noqa: BLE001 - a name that others made up must not end a daemon
            _odd(host, error)
            errors.append(UnreachableError(f"cannot reach {host!r}: that is not a host name"))
            continue
        hosts = [str(where[0]) for *_, where in infos]
        first = [h for h in hosts if family_of(h) == family_of(hosts[0])]
        other = [h for h in hosts if h not in first]
        found |= {(h, port): None for h in chain.from_iterable(zip_longest(first, other)) if h is not None}
    return list(found), errors


async def _attempt(
    where: Address,
    identity: Identity,
    hello: Body,
    wanted: Stripes,
    expect: bytes | None,
    tls: ssl.SSLContext | None,
    sockets: Sockets,
    stands: Callable[[], None],
) -> _Ups:
    """Every stripe, at one address."""
    connected: list[socket.socket] = []
    stripes = wanted if isinstance(wanted, int) else await _wanted(where, wanted, connected, stands)
    hello = hello | {"link": secrets.token_bytes(16), "stripes": stripes}
    tasks = [
        asyncio.create_task(
            _dial_stripe(
                *where, identity, hello | {"stripe": number}, expect, tls, sockets, None if number else connected, stands
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
            _drop(results)
            raise handshake.error or RetryableError(f"{show_address(*where)} closed the connection at once")
    return results


async def _wanted(
    where: Address, wanted: Callable[[float], int], connected: list[socket.socket], stands: Callable[[], None]
) -> int:
    """By the round trip of a connection to there, which is put into ``connected``."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        sock = await _connect(where, stands)
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


async def _connect(where: Address, stands: Callable[[], None]) -> socket.socket:
    """A TCP connection; ``stands`` is told of it. Raises OSError."""
    sock = socket.socket(socket.AF_INET6 if family_of(where[0]) == 6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    stands()
    return sock


def _unreachable(where: Address, error: Exception) -> P2PCastError:
    """``error`` as one of this address alone."""
    if isinstance(error, P2PCastError):
        return error
    _odd(show_address(*where), error)
    errno = getattr(error, "errno", None)
    why = error if errno is None else os.strerror(errno)
    return UnreachableError(f"cannot reach {show_address(*where)}: {why}")


def _odd(where: str, error: Exception) -> None:
    """Tell of a bug: what is wrong with an address that others made up (a label too long, a NUL) is no news."""
    if not isinstance(error, OSError | ValueError | OverflowError):
        unforeseen(f"dialling {where}", error)


async def _abandon(tasks: list[asyncio.Task[_Up]]) -> None:
    """End those that still dial, and close what the others brought up."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result()[0].abort()


def _drop(ups: _Ups) -> None:
    for stripe, _, _ in ups:
        stripe.abort()


def _failure(shown: str, errors: list[P2PCastError], expect: bytes | None) -> P2PCastError:
    """Of several, what whoever was meant has said; where one node is expected, others may live at its addresses, and refuse."""
    strangers = UnreachableError if expect is None else (UnreachableError, RefusedError)
    said = [error for error in errors if not isinstance(error, strangers)]
    if said or len(errors) == 1:
        return (said or errors)[0]
    if not errors:
        return UnreachableError("no address is known")
    return UnreachableError(f"cannot reach {shown}: {'; '.join(map(str, errors))}"[:500])
