"""A seam at which somebody may watch: the steps of ``store.disk``, the requests of ``mirror.requests``.

Promise: at most one watcher at a time, and when its block ends the one before it (or nobody) is back, whatever the block raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

W = TypeVar("W")


class Watch(Generic[W]):
    """Of the whole process, and all its threads."""

    def __init__(self) -> None:
        self.watcher: W | None = None

    @contextmanager
    def by(self, watcher: W) -> Iterator[None]:
        before, self.watcher = self.watcher, watcher
        try:
            yield
        finally:
            self.watcher = before
