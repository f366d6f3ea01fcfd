"""The single path for requests to a mirror's store, with an optional watcher for tests (as ``p2pcast.files.disk`` has
for the disk).

Guarantee: every read, list, write and removal on a mirror goes through ``ask``. Without a watcher, ``ask`` calls the
store. A watcher receives each request and makes the call itself, so a test can record all requests, or kill the process
before or after any of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from p2pcast.ground.step_hook import StepHook

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """``what``: write, read, list or remove. ``url``: the mirror's URL. ``name``: the object's name below ``url``, or a
    name prefix for list. ``data``: the contents to write.
    """

    what: str
    url: str
    name: str
    data: bytes | memoryview = b""


class RequestWatcher(Protocol):
    async def request(self, request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
        """Make the request by calling ``do``, and return its result. Requests may overlap."""


_watch: StepHook[RequestWatcher] = StepHook()
watched = _watch.by
"""Context manager inside which all requests of this process go through the watcher."""


async def ask(request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
    return await (do() if _watch.watcher is None else _watch.watcher.request(request, do))
