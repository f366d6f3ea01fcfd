"""Accepts TLS connections, limiting their number, their time and the work done for each.

Guarantees:

- A connection costs only a descriptor until its whole ClientHello has arrived. TLS begins when ``HandshakeAdmission``
  admits the connection.
- At most ``handshake_places`` connections are pending. Beyond that, the oldest connection of the address with the most
  is closed, so a flood closes its own connections.
- A connection that is too slow, or sends anything but TLS, is closed.
- A process that runs out of descriptors is unhealthy, and accepts connections again once it has some.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable

from p2pcast.ground import limits
from p2pcast.ground.addresses import plain_host
from p2pcast.process.background_tasks import report_bug, spawn
from p2pcast.process.shortages import shortage
from p2pcast.sockets.handshake_admission import HandshakeAdmission, PendingConnections

BACKLOG = 512
AT_ONCE = 64
"""Connections accepted in one step of the loop."""
NO_DESCRIPTOR_S = 0.5
"""Seconds for which accepting pauses after the process has run out of descriptors."""
HANDSHAKE_SHARE = 8
"""One in this many descriptors may belong to an unauthenticated connection."""
ADMIT_INTERVAL_S = 0.005
"""Shortest time between two admissions, in seconds."""
RECORD_BYTES = 5
"""Bytes of a TLS record's header: type, version, length."""
MAX_CLIENT_HELLO_BYTES = 16 * limits.KIB
"""Largest ClientHello accepted, in one record. p2pcast's own have less than 2 KiB, including post-quantum key shares.
"""
PEEK_MIN_S, PEEK_MAX_S = 0.01, 0.25
"""Shortest and longest time in seconds between two looks at a partial ClientHello."""
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_ESTABLISHED = 1


def handshake_places() -> int:
    """Return how many connections may be pending: MAX_HANDSHAKES, but no more than a share of this process's
    descriptors. The store, links and the operator need the others.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return limits.MAX_HANDSHAKES
    return max(1, min(limits.MAX_HANDSHAKES, descriptors // HANDSHAKE_SHARE))


class TlsAcceptor:
    """Accepts connections on listening sockets and gives each a protocol from ``factory`` once TLS is up."""

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext, handshake_s: float) -> None:
        self._factory = factory
        self._tls = tls
        self._handshake_s = handshake_s
        self._sockets: list[socket.socket] = []
        self._pending: PendingConnections[_PendingHandshake] = PendingConnections(handshake_places())
        self._admission: HandshakeAdmission[_PendingHandshake] = HandshakeAdmission()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    @property
    def pending(self) -> int:
        """The number of connections accepted but not yet authenticated or closed."""
        return len(self._pending)

    def open(self, sockets: list[socket.socket]) -> None:
        """Listen on bound ``sockets``, which this object now owns."""
        self._sockets += sockets
        for sock in sockets:
            sock.listen(BACKLOG)
            self._watch(sock)

    def close(self) -> None:
        """Stop listening and close pending connections. Established connections stay."""
        loop = asyncio.get_running_loop()
        while self._sockets:
            sock = self._sockets.pop()
            loop.remove_reader(sock)
            sock.close()
        if self._timer is not None:
            self._timer.cancel()
        for pending in self._pending.all():
            pending.close()

    def authenticated(self, host: str) -> None:
        """A node at this address has authenticated."""
        self._admission.authenticated(host, asyncio.get_running_loop().time())

    def _watch(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                conn, where = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if shortage(error) is not None:  # any other error is of one connection
                    report_bug("accepting connections", error)
                loop.remove_reader(sock)
                loop.call_later(NO_DESCRIPTOR_S, self._watch, sock)
                return
            conn.setblocking(False)
            pending = _PendingHandshake(self, conn, plain_host(str(where[0])), self._handshake_s)
            if (out := self._pending.add(pending, pending.host)) is not None:
                out.close()
            pending.peek(PEEK_MIN_S)

    # -- called by pending connections

    def client_hello_received(self, pending: _PendingHandshake) -> None:
        """A whole ClientHello has arrived: queue the connection for its handshake."""
        self._admission.enqueue(pending, pending.host)
        now = asyncio.get_running_loop().time()
        # The timer may wait for another address's tokens, while this address still has some.
        if self._timer is None or self._timer_at > now + ADMIT_INTERVAL_S:
            self._schedule(now if self._timer is None else now + ADMIT_INTERVAL_S)

    def _schedule(self, at: float) -> None:
        """Admit the next connections at the time ``at``, instead of any later time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._next)

    def ended(self, pending: _PendingHandshake) -> None:
        self._pending.remove(pending)
        self._admission.cancel(pending, pending.host)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while isinstance(admitted := self._admission.next(loop.time(), _PendingHandshake.is_alive), _PendingHandshake):
            admitted.start_tls(self._factory, self._tls)
        if admitted is not None:
            self._schedule(loop.time() + max(ADMIT_INTERVAL_S, admitted))


class _PendingHandshake:
    """One accepted connection, until TLS is up or the connection is closed."""

    def __init__(self, acceptor: TlsAcceptor, sock: socket.socket, host: str, handshake_s: float) -> None:
        self.host = host
        self._acceptor = acceptor
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + handshake_s
        self._timer: asyncio.TimerHandle = self._loop.call_at(self._until, self.close)
        self._peek_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_the_loops = False
        """Whether the event loop owns the socket and will close it. If TLS is up when the task is cancelled, TLS still
        shuts down with a last exchange. Closing the socket here would free its number for reuse meanwhile.
        """

    def peek(self, delay_s: float) -> None:
        """Check whether a whole ClientHello has arrived, without consuming it. A timer repeats the check, because a
        socket with part of the message is always readable, so the loop cannot wait for the rest.
        """
        try:
            head = self._sock.recv(RECORD_BYTES + MAX_CLIENT_HELLO_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(self._sock, self._readable)
            return
        except OSError:
            self.close()
            return
        size = int.from_bytes(head[3:RECORD_BYTES])
        is_client_hello = (
            head[:1] == bytes([_HANDSHAKE])
            and head[1:2] in (b"", b"\x03")
            and head[5:6] in (b"", bytes([_CLIENT_HELLO]))
        )
        if not is_client_hello or size > MAX_CLIENT_HELLO_BYTES:
            self.close()
        elif len(head) > RECORD_BYTES and len(head) >= RECORD_BYTES + size:
            self._acceptor.client_hello_received(self)
        elif self.is_alive():
            self._peek_timer = self._loop.call_later(delay_s, self.peek, min(PEEK_MAX_S, 2 * delay_s))

    def _readable(self) -> None:
        self._loop.remove_reader(self._sock)
        self.peek(PEEK_MIN_S)

    def is_alive(self) -> bool:
        """Whether the connection is still established. If not, closes it."""
        if self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED:
            return True
        self.close()
        return False

    def start_tls(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext) -> None:
        """Begin the TLS handshake."""
        self._timer.cancel()
        self._task = spawn(self._handshake(factory, tls), "tls handshake")
        self._task.add_done_callback(self._finished)

    async def _handshake(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext) -> None:
        left_s = max(0.01, self._until - self._loop.time())
        self._is_the_loops = True
        with contextlib.suppress(OSError):  # a TLS error or a timeout
            await self._loop.connect_accepted_socket(factory, self._sock, ssl=tls, ssl_handshake_timeout=left_s)

    def _finished(self, task: asyncio.Task[None]) -> None:
        if not self._is_the_loops:
            self._sock.close()
        self._acceptor.ended(self)

    def close(self) -> None:
        """Close the connection in any state."""
        if self._task is not None:
            self._task.cancel()
            return
        self._timer.cancel()
        if self._peek_timer is not None:
            self._peek_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._acceptor.ended(self)
