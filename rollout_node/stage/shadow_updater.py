"""Moves the shadow from version to version along the path of ``rollout_node.sync.version_path``.

Promises:

- The shadow is always at a version that the run's key has sealed, or there is none.
- It moves only while it has no reader.
- A fault of one version costs that version alone.
- A shortage of this machine ends ``run``, and the next call goes on where it was.
"""

from __future__ import annotations

import logging

from p2pcast.ground.errors import IntegrityError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.control.activity import Activity
from rollout_node.stage.engine_handover import EngineHandover
from rollout_node.stage.first_shadow import ShadowStart
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.refused_versions import RefusedVersions
from rollout_node.stage.shadow_check import ShadowCheck
from rollout_node.stage.version_stager import VersionStager
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")


class ShadowUpdater:
    """``run`` until cancelled, once the peer has joined."""

    def __init__(
        self,
        *,
        start: ShadowStart,
        check: ShadowCheck,
        identities: IdentityCheck,
        stager: VersionStager,
        handover: EngineHandover,
        refused: RefusedVersions,
        planner: VersionPlanner,
        activity: Activity,
    ) -> None:
        self._start = start
        self._check = check
        self._identities = identities
        self._stager = stager
        self._handover = handover
        self._refused = refused
        self._planner = planner
        self._activity = activity
        self._begun = False
        self._due: Version | None = None
        """Staged, and not handed over yet."""

    async def run(self) -> None:
        if not self._begun:
            self._due = await self._start.begin()
            self._begun = True
        while True:
            if self._due is not None:
                await self._handover.hand_over(self._due)
                self._due = None
            await self._check.reread_if_suspected()
            await self._identities.settle()
            holding = self._planner.next_holding()
            if holding is None:
                if (gap := self._planner.gap()) is not None and self._activity.state != "stranded":
                    logger.error("%s; the hub makes one, or gets it back from a peer", gap)
                self._activity.enter(self._planner.idle_state)
                await self._planner.news.wait()
                continue
            try:
                if await self._stager.stage(holding):
                    self._due = holding.open.version
                    self._activity.error = None
            except RetryableError as error:
                logger.info("%s", error)
            except IntegrityError as error:
                await self._refused.refuse(holding, error)
