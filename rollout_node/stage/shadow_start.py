"""Stages the shadow of a peer's start, if there is one. Without a shadow, an anchor is fetched."""

from __future__ import annotations

from p2pcast.ground.version import Version
from rollout_node.shadow.shadow_state import ShadowWriter
from rollout_node.stage.first_shadow import FirstShadow
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.small_file_repair import SmallFileRepair
from rollout_node.sync.version_path import VersionPlanner


class ShadowStart:
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
        """The version of the first shadow, which is staged; None without a shadow. After an error it may be called
        again. Raises IntegrityError for a wrong base folder.
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
