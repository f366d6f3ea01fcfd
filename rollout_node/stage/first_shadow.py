"""Finds the shadow of a peer's start: of an earlier process, or from the base folder.

Promise: a shadow whose signed digest is unknown here is neither used nor discarded before the hub has listed the
digest.
"""

from __future__ import annotations

from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow
from rollout_node.control.activity import Activity
from rollout_node.control.artifact_catalog import Catalog
from rollout_node.stage.base_shadow import BaseShadow
from rollout_node.stage.saved_shadow import SavedShadow
from rollout_node.sync.version_path import VersionPlanner


class FirstShadow:
    """``base`` None: the peer has no base folder. ``resumed``: the peer started from its own state while the hub was
    out of reach.
    """

    def __init__(
        self,
        saved: SavedShadow,
        base: BaseShadow | None,
        planner: VersionPlanner,
        catalog: Catalog,
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
        """None: an anchor has to be fetched. Raises IntegrityError for a wrong base folder."""
        shadow = await self._saved.reopen(self._signed_digest)
        if shadow is None and self._base is not None:
            return await self._from_base(self._base)
        return shadow

    async def _signed_digest(self, version: Version) -> int | None:
        known = self._planner.signed_digest(version)
        if known is None and not self._catalog.complete.is_set():
            # No signed digest lies here. Only the hub's digest can tell whether the shadow is correct.
            self._activity.enter("waiting")
            await self._catalog.complete.wait()
            known = self._planner.signed_digest(version)
        return known

    async def _from_base(self, base: BaseShadow) -> Shadow:
        # A hub that has just started is still making the base's version.
        while not self._planner.whole():
            self._activity.enter("waiting")
            await self._planner.news.wait()
        return await base.make(self._planner.whole())
