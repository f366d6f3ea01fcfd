"""A trainer that must not run away from its fleet: with ``--max-lag K`` no version begins while a peer is more than K versions behind the newest.

Promise: a peer that leaves is not waited for; who is waited for is said once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from p2pcast.version import Version

logger = logging.getLogger("p2pcast.hub")


class Follower(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def committed(self) -> Version | None: ...


def laggards(peers: Iterable[Follower], versions: Iterable[Version], most: int) -> list[str]:
    """Names of the peers whose committed version has more than ``most`` of ``versions`` after it; all of them come after none. Pure."""
    newest = sorted(set(versions), reverse=True)
    if len(newest) <= most:
        return []
    # Whoever has this one, or a later one, has at most ``most`` after it.
    needed = newest[most]
    return [peer.name for peer in peers if peer.committed is None or peer.committed < needed]


class Pace:
    """``most``: None lets everything through. ``late`` says who is behind by more."""

    def __init__(self, most: int | None, late: Callable[[int], list[str]]) -> None:
        self._most = most
        self._late = late
        self._moved = asyncio.Event()
        self.waiting_for: list[str] = []
        """Peers for whom a version is held back."""

    def moved(self) -> None:
        """A peer has committed something, or left."""
        self._moved.set()

    async def until_near(self) -> None:
        """Returns once nobody is further behind than he may be."""
        if self._most is None:
            return
        try:
            while late := self._late(self._most):
                if not self.waiting_for:
                    logger.info("publishing waits: more than %d versions behind: %s", self._most, ", ".join(sorted(late)))
                self.waiting_for = late
                self._moved.clear()
                await self._moved.wait()
        finally:
            self.waiting_for = []
