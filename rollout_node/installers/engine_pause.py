"""This peer's pause of a vLLM engine.

Promises:

- The ranks note the pause before it begins. If the peer dies meanwhile, its successor knows whose pause it finds.
- A pause by another process is never ended here.
- An engine with a rank in doubt stays paused until the whole state was written and confirmed (``distrust``,
  ``settle``).

With ``driver="external"`` another process pauses and resumes the engine: ``distrust`` then pauses nothing, and the
caller never calls ``settle`` or ``begin``.
"""

from __future__ import annotations

import logging

from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import KvPolicy, recomputes
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_socket import Report
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.installer import Driver
from rollout_node.installers.rank_reports import Ranks

log = logging.getLogger("p2pcast.peer")


class EnginePause:
    """Writes ``state.pausing``."""

    def __init__(
        self, server: EngineServer, ranks: Ranks, state: InstallState, *, kv: KvPolicy, driver: Driver
    ) -> None:
        self._server, self._name, self._ranks, self._state = server, server.name, ranks, state
        self.kv, self.driver = kv, driver

    def note(self, *, ours: bool) -> None:
        """The ranks know whether a pause that follows is this peer's."""
        self._state.pausing = ours

    async def begin(self, *, ours: bool | None = None) -> None:
        """``ours``: whether this peer's pause was noted at the ranks already; None: find out, and note it."""
        if ours is None:
            ours = self._state.pausing or not await self._server.is_paused()
            if ours and not self._state.pausing:
                await self._ranks.init(pausing=True)
        self._state.pausing = ours
        await self._server.pause(clear_cache=recomputes(self.kv))

    async def end(self) -> None:
        """Resume the engine, unless the pause is another process's."""
        if self._state.pausing:
            await self._server.resume()
            self._state.pausing = False

    def ended_by_core(self) -> None:
        """The engine core resumed the engine by itself."""
        self._state.pausing = False

    async def settle(self, reports: list[Report], held: Version | None) -> None:
        """End the pause of a peer that died, or this peer's after a failure, if all ranks agree. Pause the engine if
        a rank's version is in doubt.
        """
        paused = await self._server.is_paused()
        self._state.pausing |= paused and any(r["pausing"] for r in reports)
        if self._state.uncertain:
            log.error("%s: its ranks don't hold one version; it is paused until they do", self._name)
            await self.begin()
        elif paused and self._state.pausing and held is not None:
            log.warning("%s: was left paused, and is resumed at %s", self._name, held)
            await self._server.set_label(str(held))
            await self.end()

    async def distrust(self) -> None:
        """Ignore the ranks' versions, and pause the engine, until a dense install has been confirmed."""
        self._state.doubt()
        self._state.lose_version()
        await self._ranks.init(forget=True)
        if self.driver == "peer":
            await self.begin()
