"""The hub's shadow: the newest state, against which the next delta is encoded.

Guarantees:

- After a restart the shadow is at the newest sealed version, or there is no shadow.
- Corrupt cells are repaired from the artifacts on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.node import Node
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.state.version_reader import replay_to, restore_cells
from p2pcast.store.artifact_store import ArtifactStore

logger = logging.getLogger("p2pcast.hub")

T = TypeVar("T")


class HubShadow:
    """``folder``: the shadow's folder, on tmpfs. ``seen`` is called with the version of a shadow found there."""

    def __init__(
        self, node: Node, store: ArtifactStore, staging: Staging, folder: Path, seen: Callable[[Version], None]
    ) -> None:
        self.folder = folder
        self.shadow: Shadow | None = None
        self.reading = asyncio.Lock()
        """Held while the shadow is read during live traffic: until then the shadow is not replaced."""
        self._node = node
        self._store = store
        self._staging = staging
        self._seen = seen

    def close(self) -> None:
        if self.shadow is not None:
            self.shadow.close()
            self.shadow = None

    async def replace(self, filled: Callable[[], Awaitable[tuple[Shadow, T]]]) -> T:
        """Close the shadow and replace it with a new one. If ``filled`` fails, there is no shadow."""
        async with self.reading:
            self.close()
            self.shadow, rest = await filled()
        return rest

    async def restore(self) -> None:
        """Reuse an earlier process's shadow, or rebuild it from the store's newest anchor and its deltas."""
        newest = self._store.newest()
        if newest is None:
            return
        manifest = self._store.manifest(newest)
        layout = next(s.assembly.layout for s in self._store.artifacts.values() if s.version == newest)
        assert manifest is not None
        try:
            shadow = await self._staging.run(Shadow.open, self.folder, layout)
        except P2PCastError:
            shadow = None
        if shadow is not None:
            self._seen(shadow.version)
            if shadow.version == newest and shadow.state_digest == manifest.state:
                corrupt = await self._staging.run(shadow.verify, self._staging.workers)
                if not corrupt or await self._repair(shadow):
                    self.shadow = shadow
                    return
                shadow.close()
                shadow = None
        self.shadow = await self._rebuild(shadow)

    async def repair(self) -> bool:
        """Repair the shadow's corrupt cells. Returns whether there were any, and all of them are repaired."""
        return self.shadow is not None and await self._repair(self.shadow)

    async def _repair(self, shadow: Shadow) -> bool:
        corrupt = await self._staging.run(shadow.verify, self._staging.workers)
        if not corrupt:
            return False
        logger.error("%d cells of the shadow are corrupt", len(corrupt))
        replay = replay_to(shadow.version, [h for h in self._node.holdings.values() if h.finished])
        if replay is None:
            return False
        if left := await self._staging.run(restore_cells, shadow, corrupt, replay):
            logger.error("%d of them could not be repaired: %s", len(left), left[0][1])
            return False
        logger.warning("%d cells of the shadow were repaired from the artifacts on disk", len(corrupt))
        return True

    async def _rebuild(self, shadow: Shadow | None) -> Shadow | None:
        """Follow the cheapest path to the newest version, from ``shadow`` if its state is known."""
        held = None
        if shadow is not None:
            known = self._store.manifest(shadow.version)
            held = shadow.version if known is not None and known.state == shadow.state_digest else None
        edges = [Edge(s.id, s.base, s.version, s.manifest.log) for s in self._store.artifacts.values()]
        for edge in cheapest_path(held, edges):
            holding = self._node.holdings[edge.artifact]
            if edge.base is None:
                if shadow is not None:
                    shadow.close()
                shadow = await self._staging.fill(holding, self.folder)
            else:
                assert shadow is not None
                await self._staging.apply(shadow, await self._staging.patch(holding, shadow))
                shadow.drop_patches(edge.version)
        return shadow
