"""The first shadow of a peer that has the base folder: nothing is downloaded for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import Store
from rollout_node.shadow.base_folder import BaseFolder, WholeVersions
from rollout_node.shadow.shadow_state import log_size

logger = logging.getLogger("p2pcast.peer")


class LayoutTaker(Protocol):
    def add_layout(self, layout: Layout) -> None: ...


class BaseShadow:
    """``folder``: where the shadow lies."""

    def __init__(self, base: BaseFolder, folder: Path, node: LayoutTaker, store: Store, staging: Staging) -> None:
        self._base = base
        self._folder = folder
        self._node = node
        self._store = store
        self._staging = staging

    async def make(self, whole: WholeVersions) -> Shadow:
        """``whole``: the run's versions. Raises IntegrityError for a folder that is none of them."""
        base = self._base
        version, folder = base.version_among(whole), base.checkpoint.folder
        if version is None:
            raise IntegrityError(
                f"wrong base: {folder} (digest {base.digest:016x}) is not a version that this run keeps whole; "
                "give the folder that the hub was started from, or leave --base out to fetch it"
            )
        self._node.add_layout(base.layout)
        await self._staging.run(self._store.keep_files, await self._staging.run(base.small_files))
        logger.info("base %s is version %s: nothing to download", folder, version)
        log_size(base.layout, self._folder)
        return await self._staging.new_shadow(self._folder, base.layout, version, base.checkpoint.lent, base.digest)
