"""Reads the shadow, compares its cells with their digests, and has corrupt cells repaired.

Guarantee: after a pass, the shadow is correct or has been discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from p2pcast.codec.layout import Cell
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from rollout_node.shadow.shadow_state import ShadowWriter
from rollout_node.stage.shadow_repair import ShadowRepair

REREAD_S = 30.0
"""Seconds between two passes over the shadow caused by wrong weights in engines, whose own fault they may be."""


class ShadowCheck:
    """``replan`` wakes the updater, which calls ``reread_if_suspected``. ``on_corrupt`` is called once corrupt cells
    that readers may have seen have been repaired or given up.
    """

    def __init__(
        self,
        writer: ShadowWriter,
        staging: Staging,
        repair: ShadowRepair,
        replan: Callable[[], None],
        on_corrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_corrupt = on_corrupt
        self._writer = writer
        self._staging = staging
        self._repair = repair
        self._replan = replan
        self._suspected = False
        """Whether an engine got wrong weights since the shadow was last read for that reason."""
        self._reread_s = -REREAD_S

    def suspect(self) -> None:
        """Have the shadow read and compared with its digests, because an engine got wrong weights from it."""
        self._suspected = True
        self._replan()

    async def reread_if_suspected(self) -> None:
        now, shadow = asyncio.get_running_loop().time(), self._writer.shadow
        if self._suspected and shadow is not None and now - self._reread_s > REREAD_S:
            self._suspected, self._reread_s = False, now
            await self.reread(shadow)

    async def reread(self, shadow: Shadow) -> bool:
        """Whether any cell was corrupt. Afterwards, the shadow is correct or has been discarded."""
        corrupt = await self._corrupt(shadow)
        if not corrupt:
            return False
        try:
            if not await self._repair.repair_cells(shadow, corrupt, self._writer.moving):
                await self._writer.drop()
        finally:
            self._on_corrupt()
        return True

    async def repaired(self, shadow: Shadow) -> bool:
        """Whether all cells of a shadow without readers are correct, if necessary after a repair."""
        corrupt = await self._corrupt(shadow)
        return not corrupt or await self._repair.repair_cells(shadow, corrupt, contextlib.nullcontext)

    async def _corrupt(self, shadow: Shadow) -> list[Cell]:
        return await self._staging.run(shadow.verify, self._staging.workers)
