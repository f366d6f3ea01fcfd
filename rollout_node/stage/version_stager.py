"""Brings the shadow to a version, by a patch decoded from a delta or from scratch by a whole state.

Guarantee: the shadow moves only to versions that the hub has signed as durable.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.progress_bar import ProgressMeter
from p2pcast.relay.holding import Holding
from p2pcast.state.shadow import Shadow, ShadowPhase
from p2pcast.state.staging import Staging
from rollout_node.control.activity import Activity
from rollout_node.shadow.shadow_state import ShadowWriter, log_size
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.small_file_repair import SmallFileRepair


class VersionStager:
    """``folder``: where the shadow is stored."""

    def __init__(
        self,
        writer: ShadowWriter,
        folder: Path,
        staging: Staging,
        files: SmallFileRepair,
        identities: IdentityCheck,
        activity: Activity,
    ) -> None:
        self._writer = writer
        self._folder = folder
        self._staging = staging
        self._files = files
        self._identities = identities
        self._activity = activity

    async def stage(self, holding: Holding) -> bool:
        """Stage the artifact's version, and return whether that succeeded. If its base differs from the staged version,
        discard the shadow and return False. Raises RetryableError, IntegrityError.
        """
        self._activity.enter("receiving")
        version, shadow = holding.open.version, self._writer.shadow
        if holding.open.base is None:
            await self._fill(holding)
        else:
            assert shadow is not None, "a delta is on no path before a version is staged"
            if not await self._identities.follows(holding.open.base_hash, version):
                return False
            await self._apply(holding, shadow)
        self._writer.stage(version, self._identities.identity_of(version))
        return True

    async def _apply(self, holding: Holding, shadow: Shadow) -> None:
        patch = await self._staging.patch(holding, shadow)
        try:
            await holding.until_durable()
        except RetryableError:
            await self._staging.run(partial(patch.unlink, missing_ok=True))
            raise
        await self._files.complete(holding.open.version, shadow.layout)
        async with self._writer.moving():
            try:
                await self._staging.apply(shadow, patch)
            except Exception:
                if shadow.phase is not ShadowPhase.CLEAN:  # the patch is only partly applied
                    self._writer.close()
                raise

    async def _fill(self, holding: Holding) -> None:
        layout, seen = holding.assembly.layout, 0
        log_size(layout, self._folder)
        with ProgressMeter(f"version {holding.open.version}") as meter:
            while not holding.finished:
                holding.progress.clear()
                if holding.aborted:
                    raise RetryableError(f"version {holding.open.version} was aborted, or comes another way now")
                await holding.progress.wait()
                held = holding.artifact.held.count * holding.open.piece
                meter(held - seen, max(held, layout.nbytes))
                seen = held
        await holding.until_durable()
        await self._files.complete(holding.open.version, layout)
        async with self._writer.moving():
            self._writer.close()
            self._writer.open(await self._staging.fill(holding, self._folder))
