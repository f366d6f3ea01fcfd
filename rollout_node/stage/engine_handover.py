"""Has the staged version installed, and lets the shadow move on once no engine needs it at that version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from p2pcast.ground.version import Version
from rollout_node.control.activity import Activity
from rollout_node.engine.engines import Engines
from rollout_node.shadow.shadow_state import ShadowWriter
from rollout_node.sync.version_path import VersionPlanner
from rollout_node.timeline import Timeline

logger = logging.getLogger("p2pcast.peer")

KEPT_PATCHES = 16
"""Number of patches kept for a lagging engine; an engine further behind gets the whole state."""
SETTLE_S = 0.5
"""Seconds between checks whether the engines let the shadow move on."""


class EngineHandover:
    """``remember`` saves the newest staged version, unless ``is_regression`` reports that there was a newer one."""

    def __init__(
        self,
        writer: ShadowWriter,
        engines: Engines,
        planner: VersionPlanner,
        timeline: Timeline,
        activity: Activity,
        is_regression: Callable[[Version], bool],
        remember: Callable[[Version], Awaitable[None]],
    ) -> None:
        self._writer = writer
        self._engines = engines
        self._planner = planner
        self._timeline = timeline
        self._activity = activity
        self._is_regression = is_regression
        self._remember = remember

    async def hand_over(self, version: Version) -> None:
        """Hand ``version``, which is staged, to the engines. Returns once every engine has it or the next version is
        here, so an engine that hangs does not delay the shadow.
        """
        if not self._is_regression(version):
            await self._remember(version)
        self._activity.enter("staged")
        logger.info("version %s staged", version)
        self._drop_patches()
        self._timeline.staged(version, asyncio.get_running_loop().time())
        self._engines.on_staged(version)
        while not (self._planner.is_superseded(version) or self._engines.settled(version)):
            await self._writer.until_released(SETTLE_S)

    def _drop_patches(self) -> None:
        """Drop the patches that no engine needs any more, and those beyond ``KEPT_PATCHES``."""
        shadow = self._writer.shadow
        if shadow is not None:
            behind, every = self._engines.oldest or shadow.version, shadow.patches
            if len(every) > KEPT_PATCHES:
                behind = max(behind, every[-KEPT_PATCHES - 1])
            shadow.drop_patches(behind)
