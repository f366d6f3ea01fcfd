"""Roll-back of a switch that failed: every rank of the engine takes its old values back.

Promise: the engine is resumed only if all ranks then confirm one and the same version. Otherwise it stays paused, the
installer knows no version of it, and the next ``stage`` writes the whole state.
"""

from __future__ import annotations

import logging

from p2pcast.ground.errors import IntegrityError, P2PCastError
from p2pcast.ground.version import Version
from rollout_node.installers.engine_pause import EnginePause
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.rank_reports import FalseReportError, Ranks, common_version
from rollout_node.installers.safe_point import SwitchPoint

log = logging.getLogger("p2pcast.peer")


class SwitchRollback:
    def __init__(
        self,
        server: EngineServer,
        ranks: Ranks,
        state: InstallState,
        pause: EnginePause,
        point: SwitchPoint,
    ) -> None:
        self._server, self._ranks, self._state = server, ranks, state
        self._pause, self._point, self._name = pause, point, server.name

    async def roll_back(self, version: Version, cause: BaseException) -> None:
        """Restore every rank's old values after the switch to ``version`` failed with ``cause``. The engine resumes if
        all ranks confirm; else it stays paused. Raises nothing of p2pcast's own: the caller raises ``cause``.
        """
        try:
            held = common_version(await self._ranks.command("abort", version, self._server.deadlines.undo))
            if held is None or (held == version and isinstance(cause, FalseReportError)):
                await self._pause.distrust()
                raise IntegrityError("its ranks hold different versions")
            if held != self._state.committed:
                self._state.lose_version()
                await self._server.set_label(str(held))
            else:
                self._point.written()
            await self._pause.end()
            await self._server.finish()
        except P2PCastError as error:
            self._state.lose_version()
            stays = "it must stay paused" if self._pause.driver == "external" else "it stays paused"
            log.error("%s: %s could not be taken back (%s): %s until it is repaired", self._name, version, error, stays)
