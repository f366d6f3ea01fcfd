"""Removes artifacts from the node and the store: aborted, no longer needed, or damaged ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from p2pcast.relay.holding import Holding
from p2pcast.store.artifact_store import ArtifactStore


class DroppingNode(Protocol):
    """The part of the node that drops artifacts."""

    def give_up(self, holding: Holding) -> None:
        """Drop a holding that is no longer needed, but keep its log."""

    def forget(self, artifact: bytes) -> None:
        """Drop an artifact that has been removed from the store."""


class ArtifactRemoval:
    """``blocking`` runs a function in a thread; ``background`` starts a task of the peer."""

    def __init__(
        self,
        node: DroppingNode,
        store: ArtifactStore,
        blocking: Callable[..., Awaitable[Any]],
        background: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._node = node
        self._store = store
        self._blocking = blocking
        self._background = background

    def remove_aborted(self, holding: Holding) -> None:
        """Remove the log of a holding that the node has aborted."""
        if holding.excerpt:
            self._background(self._end_excerpt(holding), f"end {holding.open.version}")
        else:
            self._background(self._abandon(holding), f"abandon {holding.open.version}")

    def give_up(self, holding: Holding) -> None:
        """Discard an artifact that is no longer on any path."""
        self._node.give_up(holding)
        self._background(self._abandon(holding), f"give up {holding.open.version}")

    async def end_excerpt(self, holding: Holding) -> None:
        """Remove an excerpt that is no longer needed."""
        self._node.give_up(holding)
        await self._end_excerpt(holding)

    async def discard(self, artifact: bytes, *, contradicted: bool = False) -> None:
        """Discard a damaged stored copy. ``contradicted``: it is not the run's version of that number."""
        self._node.forget(artifact)
        await self._blocking(partial(self._store.discard, artifact, contradicted=contradicted))

    async def _abandon(self, holding: Holding) -> None:
        await self._blocking(self._store.abandon, holding.log, holding.id)

    async def _end_excerpt(self, holding: Holding) -> None:
        await self._blocking(self._store.end_excerpt, holding.log, holding.id)
