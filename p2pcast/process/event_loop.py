"""The daemons' event loop: uvloop, with workarounds for one of its bugs.

uvloop closes a transport's descriptor by number. uvloop detaches the socket object given to ``create_connection`` only
once the connection is up. If the other side resets the connection earlier, the socket object keeps the number and
closes it again when collected. By then the number may belong to a file or to the listening socket. (uvloop 0.23; its
issues 645 and 738 are two other causes of the same fault.) The same holds for the file object of a pipe, if the caller
is cancelled while the pipe is connected. Libraries on this loop pass sockets too, so the workarounds are in the loop
and not in ``transport.dial``.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from p2pcast.process import garbage_collection

T = TypeVar("T")


class Loop(uvloop.Loop):  # type: ignore[misc]
    """uvloop's loop, which takes ownership of every socket and pipe given to it."""

    async def create_connection(self, *args: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        """See ``asyncio.loop.create_connection``."""
        try:
            return await super().create_connection(*args, sock=sock, **options)
        finally:
            if sock is not None:
                sock.detach()

    async def connect_read_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        """See ``asyncio.loop.connect_read_pipe``."""
        return await self._connected(super().connect_read_pipe(protocol_factory, pipe))

    async def connect_write_pipe(self, protocol_factory: Any, pipe: Any) -> Any:
        """See ``asyncio.loop.connect_write_pipe``."""
        return await self._connected(super().connect_write_pipe(protocol_factory, pipe))

    async def _connected(self, connecting: Coroutine[Any, Any, tuple[Any, Any]]) -> tuple[Any, Any]:
        """Return the transport and protocol. A cancellation waits for the connection, which takes one turn of the loop.
        By then the transport owns the pipe, and closes both.
        """
        task, cancelled = self.create_task(connecting), None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if not task.cancelled() and task.exception() is None:
                task.result()[0].close()
            raise cancelled
        transport, protocol = task.result()
        return transport, protocol


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop, for a thread or for ``asyncio.Runner``."""
    loop: asyncio.AbstractEventLoop = Loop()
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion on a new loop, like ``asyncio.run``. The garbage collector ignores objects that
    exist already: they are mostly modules, which stay, and a full collection of a ledger's takes 46 ms.
    """
    garbage_collection.end_start()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
