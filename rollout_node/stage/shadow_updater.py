"""Moves the shadow from version to version along the path of ``rollout_node.sync.version_path``.

Guarantees:

- The shadow is always at a version sealed with the run's key, or there is no shadow.
- It moves only while it has no readers.
- If something is wrong with a version, only that version is affected: the updater determines whether the shadow, the
  artifact or the digests are at fault, and tries again later.
- If this machine runs short of a resource, ``run`` raises, and the next call continues where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import IntegrityError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from rollout_node.control.activity import Activity
from rollout_node.shadow.shadow_state import ShadowWriter
from rollout_node.stage.engine_handover import EngineHandover
from rollout_node.stage.first_shadow import ShadowStart
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.shadow_check import ShadowCheck
from rollout_node.stage.version_stager import VersionStager
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")

REFUSED_S = 0.5
REFUSED_MAX_S = 60.0
"""Seconds before a refused artifact is tried again; the delay doubles each time, up to the second value."""


class RefusedVersions:
    """Handles versions that do not fit the shadow. ``report`` is called with each refused version and the reason."""

    def __init__(
        self,
        writer: ShadowWriter,
        check: ShadowCheck,
        planner: VersionPlanner,
        removal: ArtifactRemoval,
        report: Callable[[Version, str], None],
    ) -> None:
        self._writer = writer
        self._check = check
        self._planner = planner
        self._removal = removal
        self._report = report
        self._backoffs: dict[bytes, Backoff] = {}
        """Artifact → the delay before it is tried again."""

    async def refuse(self, holding: Holding, error: IntegrityError) -> None:
        """Repair a corrupt shadow or discard a damaged artifact. Returns once the artifact may be tried again."""
        logger.error("version %s refused: %s", holding.open.version, error)
        self._report(holding.open.version, str(error))
        backoff = self._backoffs.setdefault(holding.id, Backoff(REFUSED_S, REFUSED_MAX_S, None))
        corrupt, shadow = False, self._writer.shadow
        if shadow is not None and holding.open.base == self._writer.staged:
            corrupt = await self._check.reread(shadow)
            if not corrupt and (backoff.attempts or self._planner.signed_digest(shadow.version) != shadow.state_digest):
                # Every cell matches its digest, yet versions do not fit, so the digests are wrong.
                await self._writer.drop()
        if not corrupt and holding.finished:
            # The artifact was intact when it arrived, so it was damaged on this peer's disk.
            await self._removal.discard(holding.id)
            self._planner.replan()
        await asyncio.sleep(backoff.next_s())


@dataclass(eq=False, repr=False, kw_only=True)
class ShadowUpdater:
    """Moves the shadow while ``run`` is running; start it once the peer has joined."""

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
    """The version that is staged but has not been handed over."""

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
