"""Finds a starting peer's shadow, left by an earlier process or made from the base folder.

Guarantee: a shadow for which no signed digest is known here is neither used nor discarded until the hub has listed it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.control.activity import Activity
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.shadow.base_folder import BaseFolder, WholeVersions
from rollout_node.shadow.shadow_state import ShadowWriter, log_size
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.saved_shadow import SavedShadow
from rollout_node.stage.small_file_repair import SmallFileRepair
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")


class FirstShadow:
    """``base``: None if the peer has no base folder. ``resumed``: whether the peer started from its own state because
    the hub was unreachable.
    """

    def __init__(
        self,
        saved: SavedShadow,
        base: BaseShadow | None,
        planner: VersionPlanner,
        catalog: ArtifactCatalog,
        activity: Activity,
        *,
        resumed: bool,
    ) -> None:
        self._saved = saved
        self._base = base
        self._planner = planner
        self._catalog = catalog
        self._activity = activity
        self._resumed = resumed

    async def until_listed(self) -> None:
        """Wait for the hub's list of artifacts, unless this peer can start from its own state."""
        if not self._resumed or not self._saved.has_versions:
            self._activity.enter("waiting" if self._resumed else "joining")
            await self._catalog.complete.wait()

    async def find(self) -> Shadow | None:
        """Return the shadow, or None if an anchor has to be fetched. Raises IntegrityError for a wrong base folder."""
        shadow = await self._saved.reopen(self._signed_digest)
        if shadow is None and self._base is not None:
            return await self._from_base(self._base)
        return shadow

    async def _signed_digest(self, version: Version) -> int | None:
        known = self._planner.signed_digest(version)
        if known is None and not self._catalog.complete.is_set():
            # No signed digest is here, so only the hub's digest can tell whether the shadow is correct.
            self._activity.enter("waiting")
            await self._catalog.complete.wait()
            known = self._planner.signed_digest(version)
        return known

    async def _from_base(self, base: BaseShadow) -> Shadow:
        # A hub that has just started is still encoding the base's version.
        while not self._planner.whole():
            self._activity.enter("waiting")
            await self._planner.news.wait()
        return await base.make(self._planner.whole())


class LayoutTaker(Protocol):
    def add_layout(self, layout: Layout) -> None: ...


class BaseShadow:
    """Makes the first shadow of a peer with a base folder, without downloading anything. ``folder``: where the shadow
    is stored.
    """

    def __init__(
        self, base: BaseFolder, folder: Path, node: LayoutTaker, store: ArtifactStore, staging: Staging
    ) -> None:
        self._base = base
        self._folder = folder
        self._node = node
        self._store = store
        self._staging = staging

    async def make(self, whole: WholeVersions) -> Shadow:
        """Make the shadow. ``whole``: the run's versions. Raises IntegrityError if the folder is none of them."""
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


class ShadowStart:
    """Stages a starting peer's shadow, if there is one. Otherwise an anchor is fetched."""

    def __init__(
        self,
        first: FirstShadow,
        writer: ShadowWriter,
        identities: IdentityCheck,
        files: SmallFileRepair,
        planner: VersionPlanner,
    ) -> None:
        self._first = first
        self._writer = writer
        self._identities = identities
        self._files = files
        self._planner = planner

    async def begin(self) -> Version | None:
        """Stage the first shadow and return its version, or None if there is no shadow. May be called again after an
        error. Raises IntegrityError for a wrong base folder.
        """
        await self._first.until_listed()
        await self._identities.settle()
        if (shadow := self._writer.shadow) is None:
            shadow = await self._first.find()
            self._writer.open(shadow)
        if shadow is not None:
            await self._files.complete(shadow.version, shadow.layout, deep=True)
            self._writer.stage(shadow.version, self._identities.identity_of(shadow.version))
        self._planner.begun.set()
        return self._writer.staged
