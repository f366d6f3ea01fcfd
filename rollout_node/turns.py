"""``--rolling K``: at most K engines of a peer are being switched at one time.

Promise: whoever is inside is being switched, or was ready when it came in and is not ready since. So no more than K engines are out of use because of
p2pcast, and a version that engines reject stops at K of them.
"""

from __future__ import annotations

from typing import Protocol

from p2pcast.errors import UsageError


class Waker(Protocol):
    def wake(self) -> None: ...


class Turns:
    """``size`` None: everybody at once."""

    def __init__(self, size: int | None = None) -> None:
        """Raises UsageError."""
        if size is not None and size < 1:
            raise UsageError(f"--rolling {size}: at least one engine has to be switched at a time")
        self._size = size
        self._inside: list[Waker] = []
        self._waiting: list[Waker] = []

    @property
    def limited(self) -> bool:
        return self._size is not None

    def take(self, who: Waker) -> bool:
        """Whether ``who`` is inside now. If not, it is woken when it may try again."""
        if who not in self._inside:
            if self._size is not None and len(self._inside) >= self._size:
                if who not in self._waiting:
                    self._waiting.append(who)
                return False
            if who in self._waiting:
                self._waiting.remove(who)
            self._inside.append(who)
        return True

    def leave(self, who: Waker) -> None:
        """Those who were turned away try again, in the order in which they came."""
        if who in self._waiting:
            self._waiting.remove(who)
        if who in self._inside:
            self._inside.remove(who)
            for waker in self._waiting:
                waker.wake()
