"""The shadow that an earlier process left in its folder.

Guarantee: it is reused only if its state matches a signed digest and all its cells are correct.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow, layout_in
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.stage.shadow_check import ShadowCheck

logger = logging.getLogger("p2pcast.peer")

SignedDigest = Callable[[Version], Awaitable[int | None]]
"""Returns the digest of a version's state from a signed record; None if no version of the run has that number."""


class SavedShadow:
    """``base``: the layout of the base folder, if this peer has one."""

    def __init__(
        self, folder: Path, store: ArtifactStore, staging: Staging, check: ShadowCheck, base: Layout | None
    ) -> None:
        self._folder = folder
        self._store = store
        self._staging = staging
        self._check = check
        self._base = base

    @property
    def has_versions(self) -> bool:
        """Whether the store next to the shadow has a version."""
        return self._store.newest() is not None

    async def reopen(self, signed_digest: SignedDigest) -> Shadow | None:
        for layout in self._layouts():
            try:
                shadow: Shadow = await self._staging.run(Shadow.open, self._folder, layout)
            except IntegrityError:
                continue
            except LocalError:
                return None
            known = await signed_digest(shadow.version)
            if known is None or known != shadow.state_digest or not await self._check.repaired(shadow):
                shadow.close()
                return None
            logger.info("the shadow of an earlier process is good: version %s", shadow.version)
            return shadow
        return None

    def _layouts(self) -> Collection[Layout]:
        seen = {s.assembly.layout.layout_id: s.assembly.layout for s in self._store.artifacts.values()}
        for layout in (self._base, layout_in(self._folder)):
            if layout is not None:
                seen.setdefault(layout.layout_id, layout)
        return seen.values()
