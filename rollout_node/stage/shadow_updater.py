"""Moves the shadow from version to version along the path of ``rollout_node.sync.version_path``.

Promises:

- The shadow is always at a version that the run's key has sealed, or there is none.
- It moves only while it has no reader.
- A fault of one version costs that version alone.
- A shortage of this machine ends ``run``, and the next call goes on where it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

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


@dataclass(eq=False, repr=False, kw_only=True)
class ShadowUpdater:
    """``run`` until cancelled, once the peer has joined."""

    start: ShadowStart
    check: ShadowCheck
    identities: IdentityCheck
    stager: VersionStager
    handover: EngineHandover
    refused: RefusedVersions
    planner: VersionPlanner
    activity: Activity
    _begun: bool = field(init=False, default=False)
    _due: Version | None = field(init=False, default=None)
    """Staged, and not handed over yet."""

    async def run(self) -> None:
        if not self._begun:
            self._due = await self.start.begin()
            self._begun = True
        while True:
            if self._due is not None:
                await self.handover.hand_over(self._due)
                self._due = None
            await self.check.reread_if_suspected()
            await self.identities.settle()
            holding = self.planner.next_holding()
            if holding is None:
                if (gap := self.planner.gap()) is not None and self.activity.state != "stranded":
                    logger.error("%s; the hub makes one, or gets it back from a peer", gap)
                self.activity.enter(self.planner.idle_state)
                await self.planner.news.wait()
                continue
            try:
                if await self.stager.stage(holding):
                    self._due = holding.open.version
                    self.activity.error = None
            except RetryableError as error:
                logger.info("%s", error)
            except IntegrityError as error:
                await self.refused.refuse(holding, error)
