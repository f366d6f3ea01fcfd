"""Accepting behind TLS: who comes in is counted, timed, and let do something before anything is done for it.

Promises: a connection costs a descriptor until a whole ClientHello has come, and TLS's own work not before the turnstile's turn has come to its address; at most MAX_HANDSHAKES at a time are on their way
through, and of the address with the most the oldest gives way, so a flood pushes itself out; one that is too slow, or speaks no TLS, is closed and costs nothing more; a machine that has run
out of descriptors accepts again when it has some.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from p2pcast import limits
from p2pcast.addresses import plain_host
from p2pcast.tasks import spawn
from p2pcast.transport.turnstile import Crowd, Turnstile

BACKLOG = 512
AT_ONCE = 64
"""Connections accepted before others have their turn on the loop."""
EXHAUSTED_S = 0.5
"""No descriptor was left: so long nobody is accepted."""
TURN_S = 0.005
"""Between two looks at whose turn it is."""
RECORD_BYTES = 5
"""The head of a TLS record: type, version, length."""
MOST_GREETING_BYTES = 16 * limits.KIB
"""A ClientHello in one record; ours have less than 2 KiB, keys that withstand quantum computers among them."""
LOOK_MIN_S, LOOK_MAX_S = 0.01, 0.25
"""Between two looks at a ClientHello that has come in part."""
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_ESTABLISHED = 1


class Door:
    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext, handshake_s: float) -> None:
        self._factory = factory
        self._tls = tls
        self._handshake_s = handshake_s
        self._sockets: list[socket.socket] = []
        self._inside: Crowd[_Knock] = Crowd(limits.MAX_HANDSHAKES)
        self._turnstile: Turnstile[_Knock] = Turnstile()
        self._turn: asyncio.TimerHandle | None = None
        self._turn_at = 0.0

    @property
    def knocking(self) -> int:
        """Connections on their way through."""
        return len(self._inside)

    def open(self, sockets: list[socket.socket]) -> None:
        """``sockets`` are bound, and ours from now on."""
        self._sockets += sockets
        for sock in sockets:
            sock.listen(BACKLOG)
            self._attend(sock)

    def close(self) -> None:
        """Those that are through stay."""
        loop = asyncio.get_running_loop()
        while self._sockets:
            sock = self._sockets.pop()
            loop.remove_reader(sock)
            sock.close()
        if self._turn is not None:
            self._turn.cancel()
        for knock in self._inside.all():
            knock.end()

    def proved(self, host: str) -> None:
        """Somebody from there is through, and has shown who it is."""
        self._turnstile.proved(host, asyncio.get_running_loop().time())

    def _attend(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                found, where = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                loop.remove_reader(sock)
                loop.call_later(EXHAUSTED_S, self._attend, sock)
                return
            found.setblocking(False)
            knock = _Knock(self, found, plain_host(str(where[0])), self._handshake_s)
            if (out := self._inside.enter(knock, knock.host)) is not None:
                out.end()
            knock.look(LOOK_MIN_S)

    # -- for those that knock

    def greeted(self, knock: _Knock) -> None:
        """It has said something that may be TLS."""
        self._turnstile.arrive(knock, knock.host)
        now = asyncio.get_running_loop().time()
        # Others may be waiting for their allowance; this one may have some left.
        if self._turn is None or self._turn_at > now + TURN_S:
            self._look_at(now if self._turn is None else now + TURN_S)

    def _look_at(self, at: float) -> None:
        """Whose turn it is, and not later."""
        if self._turn is not None:
            self._turn.cancel()
        self._turn_at = at
        self._turn = asyncio.get_running_loop().call_at(at, self._next)

    def gone(self, knock: _Knock) -> None:
        self._inside.leave(knock)
        self._turnstile.give_up(knock, knock.host)

    def _next(self) -> None:
        loop = asyncio.get_running_loop()
        self._turn = None
        while isinstance(found := self._turnstile.next(loop.time(), _Knock.waits), _Knock):
            found.begin(self._factory, self._tls)
        if found is not None:
            self._look_at(loop.time() + max(TURN_S, found))


class _Knock:
    """One connection on its way through."""

    def __init__(self, door: Door, sock: socket.socket, host: str, handshake_s: float) -> None:
        self.host = host
        self._door = door
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + handshake_s
        self._timer: asyncio.TimerHandle = self._loop.call_at(self._until, self.end)
        self._again: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def look(self, next_s: float) -> None:
        """Whether a whole ClientHello has come; it stays where it is. Nothing is waiting for the rest but a timer: a socket that holds a part of it is readable all the time."""
        try:
            said = self._sock.recv(RECORD_BYTES + MOST_GREETING_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(self._sock, self._readable)
            return
        except OSError:
            self.end()
            return
        size = int.from_bytes(said[3:RECORD_BYTES])
        likely = said[:1] == bytes([_HANDSHAKE]) and said[1:2] in (b"", b"\x03") and said[5:6] in (b"", bytes([_CLIENT_HELLO]))
        if not likely or size > MOST_GREETING_BYTES:
            self.end()
        elif len(said) > RECORD_BYTES and len(said) >= RECORD_BYTES + size:
            self._door.greeted(self)
        elif self.waits():
            self._again = self._loop.call_later(next_s, self.look, min(LOOK_MAX_S, 2 * next_s))

    def _readable(self) -> None:
        self._loop.remove_reader(self._sock)
        self.look(LOOK_MIN_S)

    def waits(self) -> bool:
        """Whether anything may still come of it; if not, that was the end of it."""
        if self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED:
            return True
        self.end()
        return False

    def begin(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext) -> None:
        """Its turn has come."""
        self._timer.cancel()
        self._task = spawn(self._shake(factory, tls), "tls handshake")
        self._task.add_done_callback(self._over)

    async def _shake(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext) -> None:
        left_s = max(0.01, self._until - self._loop.time())
        try:
            await self._loop.connect_accepted_socket(factory, self._sock, ssl=tls, ssl_handshake_timeout=left_s)
        except OSError:  # TLS's errors and time-outs are among them
            self._sock.close()
        except BaseException:
            self._sock.close()
            raise

    def _over(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # Perhaps before it had begun.
            self._sock.close()
        self._door.gone(self)

    def end(self) -> None:
        """Wherever it is."""
        if self._task is not None:
            self._task.cancel()
            return
        self._timer.cancel()
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._door.gone(self)
