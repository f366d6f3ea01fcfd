"""``--rolling K``: switches at most K engines of a peer at a time.

Guarantee: an engine with a slot is being switched, or was ready when it took the slot and has not been ready since. So
at most K engines are offline because of p2pcast, and a version that engines reject stops at K of them.
"""

from __future__ import annotations

from typing import Protocol

from p2pcast.ground.errors import UsageError


class Waker(Protocol):
    def wake(self) -> None: ...


class SwitchSlots:
    """``size``: None lets all engines switch at once."""

    def __init__(self, size: int | None = None) -> None:
        """Raises UsageError."""
        if size is not None and size < 1:
            raise UsageError(f"--rolling {size}: at least one engine has to be switched at a time")
        self._size = size
        self._holders: list[Waker] = []
        self._waiting: list[Waker] = []

    @property
    def limited(self) -> bool:
        return self._size is not None

    def take(self, who: Waker) -> bool:
        """Take a slot for ``who``, and return whether it has one. If not, it is woken when a slot is free."""
        if who not in self._holders:
            if self._size is not None and len(self._holders) >= self._size:
                if who not in self._waiting:
                    self._waiting.append(who)
                return False
            if who in self._waiting:
                self._waiting.remove(who)
            self._holders.append(who)
        return True

    def leave(self, who: Waker) -> None:
        """Free the slot of ``who``. Waiting engines are woken in the order in which they asked."""
        if who in self._waiting:
            self._waiting.remove(who)
        if who in self._holders:
            self._holders.remove(who)
            for waker in self._waiting:
                waker.wake()
