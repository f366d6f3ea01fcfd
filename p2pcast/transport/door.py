"""Accepting behind TLS: connections in TLS's own handshake are counted and timed, as those are that have it behind them.

Promises: at most MAX_HANDSHAKES at a time are in it, and the oldest gives way, so a flood of silent connections pushes itself out; one that is too slow, or speaks no TLS, is closed and costs
nothing more; a machine that has run out of descriptors accepts again when it has some.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from p2pcast import limits

BACKLOG = 512
AT_ONCE = 64
"""Connections accepted before others have their turn on the loop."""
EXHAUSTED_S = 0.5
"""No descriptor was left: so long nobody is accepted."""


class Door:
    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext, handshake_s: float) -> None:
        self._factory = factory
        self._tls = tls
        self._handshake_s = handshake_s
        self._sockets: list[socket.socket] = []
        self._knocking: dict[asyncio.Task[None], None] = {}
        """Oldest first."""

    @property
    def knocking(self) -> int:
        """Connections in TLS's handshake."""
        return len(self._knocking)

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
        for task in list(self._knocking):
            task.cancel()

    def _attend(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(AT_ONCE):
            try:
                found, _where = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                loop.remove_reader(sock)
                loop.call_later(EXHAUSTED_S, self._attend, sock)
                return
            found.setblocking(False)
            if len(self._knocking) >= limits.MAX_HANDSHAKES:
                oldest = next(iter(self._knocking))
                del self._knocking[oldest]
                oldest.cancel()
            task = loop.create_task(self._let_in(found), name="tls handshake")
            self._knocking[task] = None
            task.add_done_callback(self._through)

    def _through(self, task: asyncio.Task[None]) -> None:
        self._knocking.pop(task, None)

    async def _let_in(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, sock, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except OSError:  # TLS's errors and time-outs are among them
            sock.close()
        except BaseException:
            sock.close()
            raise
