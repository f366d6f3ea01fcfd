"""Versions that do not fit the shadow: whether shadow, artifact or digests are at fault, and when to try again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from rollout_node.shadow.shadow_state import ShadowWriter
from rollout_node.stage.shadow_check import ShadowCheck
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")

REFUSED_S = 0.5
REFUSED_MAX_S = 60.0
"""Before a refused artifact is tried again, in seconds; twice as long each time."""


class RefusedVersions:
    """``report`` is called with each refused version and the reason."""

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
        """Artifact → the time before it is tried again."""

    async def refuse(self, holding: Holding, error: IntegrityError) -> None:
        """Returns once the artifact may be tried again. A corrupt shadow is repaired, a damaged artifact discarded."""
        logger.error("version %s refused: %s", holding.open.version, error)
        self._report(holding.open.version, str(error))
        backoff = self._backoffs.setdefault(holding.id, Backoff(REFUSED_S, REFUSED_MAX_S, None))
        corrupt, shadow = False, self._writer.shadow
        if shadow is not None and holding.open.base == self._writer.staged:
            corrupt = await self._check.reread(shadow)
            if not corrupt and (backoff.attempts or self._planner.signed_digest(shadow.version) != shadow.state_digest):
                # Every cell matches its digest, and yet versions do not fit: so the digests are wrong.
                await self._writer.drop()
        if not corrupt and holding.finished:
            # The artifact was whole when it came in: it was damaged on this peer's disk.
            await self._removal.discard(holding.id)
            self._planner.replan()
        await asyncio.sleep(backoff.next_s())
