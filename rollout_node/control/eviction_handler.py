"""The hub's list of evicted nodes. It is kept for ever, and all links to such nodes are closed at once.

Guarantee: a shorter list makes this peer forget nothing, because a hub that has lost its files sends one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, Protocol

from p2pcast.ground.errors import P2PCastError, RefusedError
from p2pcast.trust.evictions import Evictions, unsigned
from p2pcast.wire import messages


class EvictionFile(Protocol):
    @property
    def evictions(self) -> Evictions: ...
    def save(self) -> None: ...


class ClosableLink(Protocol):
    @property
    def remote(self) -> bytes: ...
    def close(self, error: P2PCastError | None = None) -> None: ...


class EvictionHandler:
    """``close_accepted`` closes links dialled by evicted nodes; ``links`` lists this peer's other links. ``check_key``
    raises RefusedError for a key that the token does not pin.
    """

    def __init__(
        self,
        log: EvictionFile,
        check_key: Callable[[bytes], None],
        close_accepted: Callable[[Collection[bytes], P2PCastError], None],
        links: Callable[[], Iterable[ClosableLink]],
        blocking: Callable[..., Awaitable[None]],
        background: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._log = log
        self._check_key = check_key
        self._close_accepted = close_accepted
        self._links = links
        self._blocking = blocking
        self._background = background

    def accept(self, body: messages.Evicted, hub_key: bytes) -> None:
        """Apply the hub's list. ``hub_key``: the run's key, as sent by the hub. Raises RefusedError, IntegrityError."""
        evictions = self._log.evictions
        if body.signed is None:
            news = [s for s in map(unsigned, body.nodes) if evictions.take(s)]
        else:
            self._check_key(hub_key)
            news = evictions.accept(body.signed, hub_key)
            evictions.note_stated(body.signed)
        if not news:
            return
        nodes = {s.node for s in news if s.evicted}
        error = RefusedError("this node was evicted from the run")
        self._close_accepted(nodes, error)
        for link in self._links():
            if link.remote in nodes:
                link.close(error)
        self._background(self._save(), "evicted")

    def unreported(self, hub_key: bytes) -> list[bytes]:
        """Evictions that the hub has not listed on this connection, which it may have lost."""
        return self._log.evictions.untold(hub_key)

    async def _save(self) -> None:
        await self._blocking(self._log.save)
