"""The one way to a mirror's store: each request is a step, and a watcher may be put before them (as before those of the disk: ``p2pcast.store.disk``).

Promise: whatever of a mirror is read, listed, written or removed is asked for through here. Without a watcher a request is the store's own call; a watcher sees
it before it is made and makes it: so one that records knows all that the store was told, and one that kills does so before any request or after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from p2pcast.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """``what``: write, read, list or remove. ``url``: of the mirror; ``name``: of the object below it (of a list: what names begin with). ``data``: what is written."""

    what: str
    url: str
    name: str
    data: bytes | memoryview = b""


class Watcher(Protocol):
    async def request(self, request: Request, do: Callable[[], Awaitable[T]]) -> T:
        """Make it, and give what it gives. Several may be under way at one time."""


_watch: Watch[Watcher] = Watch()
watched = _watch.by
"""All requests of this process go through a watcher while the block runs."""


async def ask(request: Request, do: Callable[[], Awaitable[T]]) -> T:
    return await (do() if _watch.watcher is None else _watch.watcher.request(request, do))
