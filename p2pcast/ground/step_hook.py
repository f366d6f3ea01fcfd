"""A hook into a process's steps, for tests and experiments: the steps of ``files.disk``, the requests of
``mirror.requests``.

Promise: at most one watcher is active. When its block ends, even by an exception, the previous watcher (or none) is
active again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

W = TypeVar("W")


class StepHook(Generic[W]):
    """One per process, shared by all its threads."""

    def __init__(self) -> None:
        self.watcher: W | None = None

    @contextmanager
    def by(self, watcher: W) -> Iterator[None]:
        before, self.watcher = self.watcher, watcher
        try:
            yield
        finally:
            self.watcher = before
