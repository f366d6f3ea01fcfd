"""Lets tests and experiments intercept a process's steps: those of ``files.disk``, and the requests of
``mirror.requests``.

Guarantee: at most one watcher is active. When its block exits, even with an exception, the previous watcher (or none)
is active again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

W = TypeVar("W")


class StepHook(Generic[W]):
    """One kind of step has one hook per process, shared by all threads."""

    def __init__(self) -> None:
        self.watcher: W | None = None

    @contextmanager
    def by(self, watcher: W) -> Iterator[None]:
        before, self.watcher = self.watcher, watcher
        try:
            yield
        finally:
            self.watcher = before
