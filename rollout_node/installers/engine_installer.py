"""Installs into an engine's server whose ranks run p2pcast's plugin. Commands use the server's own routes; data and the
ranks' reports use the install socket.

This module does the I/O for ``install_machine``, which makes the decisions and gives the guarantees. Each instruction
becomes a command to the server (``engine_server``) or to all of its ranks (``rank_reports``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import KvPolicy
from rollout_node.in_engine import weight_audit
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_instructions import (
    Act,
    Compare,
    CoreAnswer,
    CoreSwitch,
    Instruction,
    Introduce,
    Meet,
    Met,
    Pause,
    RankCommand,
    Report,
    SetLabel,
)
from rollout_node.installers.install_machine import Flow, InstallMachine, MachineInputs, Manner, SafePoint
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.install_state import StillRunningError
from rollout_node.installers.installer import Abilities, Audit, CommitReport, Driver
from rollout_node.installers.rank_reports import Ranks

ANSWER_S: Final = 60.0
"""Added to the drain's own limit for its HTTP request, so that if both expire, the drain's is reported."""
SILENT_S: Final = 5.0
"""Longest time in seconds between two signs of life, and for the front end to answer."""
MOST_PROCESSES: Final = 4096
"""Limit on one engine's processes: its ranks, its cores, and those that exited since all ranks last answered."""

T = TypeVar("T")


class EngineInstaller:
    """Installs into one server. ``run``: the run's id; ranks ignore other runs' versions. ``ranks``: number of ranks
    that report to this peer; None means all of the server's. With ``driver="external"``, another process pauses and
    resumes the engine around ``commit``.
    """

    def __init__(
        self,
        server: EngineServer,
        socket: InstallSocket,
        *,
        run: str = "",
        kv: KvPolicy = "recompute",
        driver: Driver = "peer",
        safe_point: SafePoint = "step",
        ranks: int | None = None,
    ) -> None:
        self.name = server.name
        self._server, self._socket = server, socket
        self._ranks = Ranks(server, socket, run, ranks)
        self._layout: tuple[bytes, Layout] | None = None
        manner = Manner(kv, driver, safe_point, every_rank=ranks is None)
        inputs = MachineInputs(self._run_layout, time.monotonic, time.time, lambda: secrets.token_hex(8))
        self._machine = machine = InstallMachine(self.name, manner, inputs)
        self._pulse = EnginePulse(server, lambda: asyncio.get_running_loop().time())
        socket.signs[self._ranks.engine] = self._pulse.note
        self.abilities = Abilities(
            pulse=self._pulse,
            serving_epoch=lambda: machine.state.serving_epoch,
            follows_schedules=lambda: machine.state.traits.follows,
        )
        self._busy = asyncio.Lock()

    @property
    def committed(self) -> Version | None:
        return self._machine.state.committed

    @property
    def ready(self) -> bool:
        return self._machine.state.ready

    @property
    def commit_needs_shadow(self) -> bool:
        return self._machine.state.commit_needs_shadow

    async def start(self) -> None:
        """Raises RetryableError while the server is down, LocalError if it was not started for p2pcast."""
        self._server.open()
        await self._server.health()
        await self._run(self._machine.meet())

    async def close(self) -> None:
        await self._server.close()

    async def check(self) -> None:
        await self._run(self._machine.check())

    async def stage(self, version: Version, shadow: Path) -> None:
        await self._run(self._machine.stage(version))

    async def commit(self, version: Version) -> CommitReport:
        return await self._run(self._machine.commit(version))

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        return await self._run(self._machine.audit(layout, digests))

    async def _run(self, flow: Flow[T]) -> T:
        """Run the flow and return its result. An instruction's error, or a cancellation, is thrown into the flow, which
        may have to undo what it has begun.
        """
        async with self._busy:
            answer: Any = None
            error: BaseException | None = None
            while True:
                try:
                    instruction = flow.send(answer) if error is None else flow.throw(error)
                except StopIteration as ended:
                    result: T = ended.value
                    return result
                answer = error = None
                try:
                    answer = await self._execute(instruction)
                except BaseException as raised:  # noqa: BLE001 - the flow raises it again
                    error = raised

    async def _execute(self, instruction: Instruction) -> Any:
        server, ranks, deadlines = self._server, self._ranks, self._server.deadlines
        match instruction:
            case Meet():
                return await self._meet()
            case Introduce(pausing, forget):
                return await ranks.init(pausing=pausing, forget=forget)
            case RankCommand(phase, version, dense, whole):
                commit_s = deadlines.dense if dense else deadlines.commit
                deadline_s = {"commit": commit_s, "abort": deadlines.undo}.get(phase, deadlines.prepare)
                return await ranks.command(phase, version, deadline_s, whole=whole)
            case Compare(layout, entries, digests):
                return await asyncio.to_thread(weight_audit.compare, layout, entries, digests)
            case Pause(clear_cache):
                return await server.pause(clear_cache=clear_cache)
            case SetLabel(version):
                return await server.set_label(str(version))
            case CoreSwitch():
                return await self._switch(instruction)
            case Act():
                acts: dict[Act, Callable[[], Awaitable[Any]]] = {
                    Act.READ_LABEL: server.label,
                    Act.ASK_PAUSED: server.is_paused,
                    Act.COUNT_TOKENS: server.cached_tokens,
                    Act.BEGIN: server.begin,
                    Act.FINISH: server.finish,
                    Act.DRAIN: self._drain,
                    Act.RESUME: server.resume,
                    Act.CLEAR_CACHES: server.clear_caches,
                }
                return await acts[instruction]()

    async def _meet(self) -> Met:
        # Reading the label fails quickly if the engine hangs, whereas ``init`` may take long to learn the mapping.
        await self._server.label()
        await self._ranks.recount()
        began_at = asyncio.get_running_loop().time()
        reports = await self._ranks.init()
        self._pulse.met(began_at)
        return Met(reports, self._ranks.count)

    async def _switch(self, switch: CoreSwitch) -> CoreAnswer:
        deadlines = self._server.deadlines
        deadline_s = deadlines.dense if switch.dense else deadlines.commit
        order = {
            "version": str(switch.version),
            "nonce": secrets.token_hex(4),
            "marks": {str(rank): mark for rank, mark in switch.marks.items()},
            "clear_cache": switch.clear_cache,
            "ours": switch.ours,
            "until_unix_s": time.time() + deadline_s,
        }
        reports, core = await self._server.switch(order, deadline_s)
        return CoreAnswer(reports, core, deadline_s)

    async def _drain(self) -> None:
        limit_s = self._server.deadlines.drain
        try:
            async with asyncio.timeout(limit_s):
                await self._server.drain(limit_s + ANSWER_S)
        except TimeoutError:
            raise StillRunningError(
                f"{self.name}: running requests did not end within {limit_s:g} s (--drain-timeout); the engine goes on "
                "with its old version, and the switch is tried again"
            ) from None

    def _run_layout(self) -> Layout:
        document = self._socket.layout_document()
        if self._layout is None or self._layout[0] != document:
            self._layout = document, Layout.from_document(document)
        return self._layout[1]


class EnginePulse:
    """Signs of life of an engine's processes, which tell a frozen engine from a busy one. ``clock`` is the clock of the
    reports' times.

    Guarantee: if one of the engine's processes is stopped, the engine is unready within SILENT_S plus one check,
    whatever the peer and the engine are doing. A long step does not make it unready: processes send signs of life from
    a separate thread (``in_engine.heartbeat``), and the server's front end answers while the engine computes.
    """

    def __init__(self, server: EngineServer, clock: Callable[[], float]) -> None:
        self._server, self._clock = server, clock
        self._seen: dict[str, tuple[str, float]] = {}

    def note(self, report: Report, made_at: float) -> None:
        """Record a sign of life by a process of this engine."""
        process = report.get("incarnation")
        if isinstance(process, str) and (process[:32] in self._seen or len(self._seen) < MOST_PROCESSES):
            name = str(report.get("process") or f"rank {report['rank']}")
            self._seen[process[:32]] = name[:32], made_at

    def met(self, began_at: float) -> None:
        """Called once all ranks have answered a question asked at ``began_at``: processes silent by then are gone."""
        self._seen = {process: seen for process, seen in self._seen.items() if seen[1] >= began_at - SILENT_S}

    @property
    def beats(self) -> bool:
        """Whether the engine's plugin sends signs of life."""
        return bool(self._seen)

    async def fault(self) -> str | None:
        """Why the engine is not ready for requests; None if all of its processes are running."""
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
