"""The event loop that daemons run on: uvloop, with a workaround for one of its bugs.

uvloop closes a transport's descriptor by its number. It detaches the socket object that ``create_connection`` was given only once the connection is up. If the connection ends before
that (the other side resets it at once), the socket object keeps the number and closes it again when it is collected. By then the number may belong to a file or to the listening socket
(uvloop 0.23; its issues 645 and 738 are two other ways to the same fault). Libraries on this loop hand sockets to it too, so the workaround is here and not where we dial.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class Loop(uvloop.Loop):  # type: ignore[misc]
    """Sockets that are given to ``create_connection`` are the loop's from then on."""

    async def create_connection(self, *args: Any, sock: socket.socket | None = None, **options: Any) -> Any:
        """As ``asyncio.loop.create_connection``."""
        try:
            return await super().create_connection(*args, sock=sock, **options)
        finally:
            if sock is not None:
                sock.detach()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """For a thread or a runner of its own."""
    loop: asyncio.AbstractEventLoop = Loop()
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Until it is done, as ``asyncio.run``."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
