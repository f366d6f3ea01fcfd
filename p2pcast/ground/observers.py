"""Callbacks for one kind of event. An ``Observers`` is created before the objects that notify it and those it calls.
So two objects can call each other without either being modified after its construction. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Observers(Generic[P]):
    """Callbacks, called with the arguments of ``notify`` in the order in which they were added."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: list[Callable[P, object]] = []

    def add(self, callback: Callable[P, object]) -> None:
        self._callbacks.append(callback)

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for callback in self._callbacks:
            callback(*args, **kwargs)
