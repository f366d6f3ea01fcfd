"""Signs of life of an engine's processes, by which a frozen engine is told from a busy one.

Promise: a stopped process of the engine makes the engine unready within SILENT_S and a look, whatever the peer and the
engine do meanwhile. A long step does not: processes beat from a thread of their own (``in_engine.heartbeat``), and the
server's front end answers while its engine computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2pcast.ground.errors import P2PCastError
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_socket import Report

SILENT_S: Final = 5.0
"""Longest time in seconds between two signs of life, and for an answer of the front end."""
MOST_PROCESSES: Final = 4096
"""Of one engine: its ranks, its cores, and those that ended since all ranks answered last."""


class EnginePulse:
    """``clock``: of the reports' times."""

    def __init__(self, server: EngineServer, clock: Callable[[], float]) -> None:
        self._server, self._clock = server, clock
        self._seen: dict[str, tuple[str, float]] = {}

    def note(self, report: Report, made_at: float) -> None:
        """Of a process of this engine."""
        process = report.get("incarnation")
        if isinstance(process, str) and (process[:32] in self._seen or len(self._seen) < MOST_PROCESSES):
            name = str(report.get("process") or f"rank {report['rank']}")
            self._seen[process[:32]] = name[:32], made_at

    def met(self, began_at: float) -> None:
        """All ranks have answered a question that was asked then: processes that were silent by then are gone."""
        self._seen = {process: seen for process, seen in self._seen.items() if seen[1] >= began_at - SILENT_S}

    @property
    def beats(self) -> bool:
        """Whether the engine's plugin sends signs of life."""
        return bool(self._seen)

    async def fault(self) -> str | None:
        """Why the engine is not fit for traffic; None: each of its processes runs."""
        now = self._clock()
        silent = sorted(name for name, at in self._seen.values() if now - at > SILENT_S)
        if silent:
            return (
                f"{self._server.name}: no sign of life of {', '.join(silent)} for {SILENT_S:g} s: is the process "
                "stopped, or the machine overloaded? See the server's log, or restart the server"
            )
        try:
            await self._server.answer(SILENT_S)
        except P2PCastError as error:
            return str(error)
        return None
