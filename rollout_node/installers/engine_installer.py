"""Installs into a vLLM server whose workers run ``rollout_node.vllm_plugin``. Commands go over vLLM's own routes; data
and the workers' reports go over the install socket.

Promises:

- The engine generates while a version is staged; the engine is paused for the commit only; no request fails.
- **Mixed weights are never served.** An engine is resumed only after every rank has confirmed one and the same version.
  Otherwise the engine stays paused, its requests wait, and the next ``stage`` writes the whole state under the same
  pause.
- If the peer dies, its successor resumes the engine when all ranks agree, and repairs the engine when they do not.
- A pause by another process is never ended here. With ``driver="external"`` the installer neither pauses nor resumes:
  ``commit`` requires a paused engine, and may write the whole state there (``commit_needs_shadow``).

The parts:

- ``install_state``: all that the installer knows of the engine.
- ``rank_reports``: commands to all ranks, and their reports.
- ``engine_pulse``: signs of life of the engine's processes.
- ``engine_pause``: this peer's pause, and the repair of an engine that is in doubt.
- ``rank_preparation``: staging beside the live weights.
- ``safe_point``: when an engine may switch.
- ``engine_switch``: pause, commit, confirm, resume.
- ``switch_rollback``: the old values come back after a failed switch.

``kv``: ``p2pcast.rollouts.kv_policy``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

from p2pcast.checkpoint.adapter_form import adapter_of
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import LocalError, P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import KvPolicy
from rollout_node.in_engine import tensor_accounts, weight_audit
from rollout_node.in_engine.tensor_accounts import Account
from rollout_node.installers.engine_pause import EnginePause
from rollout_node.installers.engine_pulse import EnginePulse
from rollout_node.installers.engine_server import EngineServer, ServerAwayError
from rollout_node.installers.engine_switch import EngineSwitch
from rollout_node.installers.install_socket import InstallSocket, Report
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.installer import Audit, CommitReport, Driver
from rollout_node.installers.rank_preparation import RankPreparation
from rollout_node.installers.rank_reports import Ranks, common_version
from rollout_node.installers.safe_point import SafePoint, StillRunningError, SwitchPoint

log = logging.getLogger("p2pcast.peer")


class EngineInstaller:
    """One server. ``run``: the run's id; versions of other runs are ignored. ``ranks``: number of workers
    that report to this peer; None: all of the server's. ``driver="external"``: another process pauses and resumes the
    engine around ``commit``."""

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
        self._driver = driver
        self._state = state = InstallState()
        self._server = server
        self._ranks = Ranks(server, socket, run, ranks)
        self.pulse = EnginePulse(server, lambda: asyncio.get_running_loop().time())
        socket.signs[self._ranks.engine] = self.pulse.note
        self._pause = EnginePause(server, self._ranks, state, kv=kv, driver=driver)
        self._point = SwitchPoint(server, state, safe_point, server.deadlines.drain)
        self._preparation = RankPreparation(self._ranks, state, socket.layout_document, self._pause.distrust)
        self._switch = EngineSwitch(server, self._ranks, state, self._pause, self._point)
        self._busy = asyncio.Lock()

    @property
    def committed(self) -> Version | None:
        return self._state.committed

    @property
    def ready(self) -> bool:
        return self._state.ready

    @property
    def stretch(self) -> str | None:
        return self._state.stretch

    @property
    def follows(self) -> bool:
        return self._state.follows

    @property
    def commit_needs_shadow(self) -> bool:
        return self._state.commit_needs_shadow

    async def start(self) -> None:
        """Raises RetryableError while the server is down, LocalError when it wasn't started for p2pcast."""
        self._server.open()
        await self._server.health()
        await self._meet()

    async def close(self) -> None:
        await self._server.close()

    async def check(self) -> None:
        async with self._busy, self._noticing():
            state = self._state
            label = await self._server.label()
            if state.committed is None:
                return
            if label != str(state.committed):  # another server, or another process set the label: ask the ranks
                held = common_version(await self._meet())
                if held != state.committed:
                    state.lose_version()
                    log.warning(
                        "%s: holds %s now: restarted, or changed by another process", self.name, held or "nothing"
                    )
                    return
                await self._server.set_label(str(held))
            state.restore_contact()

    async def stage(self, version: Version, shadow: Path) -> None:
        async with self._busy, self._unready_on_error():
            state = self._state
            state.drop()
            reports = await self._meet()
            held = common_version(reports)
            if (held or common_version(reports, "before")) != state.committed:
                state.lose_version()
            if any(r["doubtful"] for r in reports) or len({r["held"] for r in reports}) > 1:
                state.doubt()
            await self._begin(reports)
            if self._driver == "peer":
                await self._pause.settle(reports, held)
            if held == version and not state.uncertain:
                if await self._server.label() != str(version):
                    await self._server.set_label(str(version))
                await self._server.finish()
                state.stage(version, CommitReport(0.0, 0))
                return
            prepared = await self._preparation.prepare(version, self._server.deadlines.prepare)
            state.prepare(dense=any(r["install"] == "dense" for r in prepared))
            installed = None
            if state.dense and self._driver == "peer":
                installed = await self._switch.switch(version, self._server.deadlines.dense)
            state.stage(version, installed)

    async def commit(self, version: Version) -> CommitReport:
        async with self._busy:
            state, deadlines = self._state, self._server.deadlines
            if state.staged != version:
                raise LocalError(f"{self.name}: {version} isn't staged, {state.staged or 'nothing'} is")
            if self._driver == "external" and state.installed is None and not await self._server.is_paused():
                raise RetryableError(
                    f"{self.name}: not paused; with --driver external, pause the engine around the commit"
                )
            async with self._unready_on_error():
                deadline_s = deadlines.dense if state.dense else deadlines.commit
                report = state.installed or await self._switch.switch(version, deadline_s)
                state.commit(version)
                self._point.written()
                if state.lacks:
                    report = replace(report, detail={**report.detail, "lacks": ", ".join(state.lacks)})
                return report

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        async with self._busy, self._noticing():
            version = self._state.committed
            if version is None:
                raise LocalError(f"{self.name}: nothing is committed, so there is nothing to audit")
            self._state.drop()
            reports = await self._meet()
            if common_version(reports) != version:
                if common_version(reports, "before") == version:
                    raise RetryableError(f"{self.name}: the run has other tensors since {version}: nothing to compare")
                self._state.lose_version()
                raise RetryableError(f"{self.name}: no longer holds {version}; it is installed anew")
            await self._begin(reports)
            try:
                reports = await self._ranks.command("audit", version, self._server.deadlines.prepare)
            finally:
                await self._server.finish()
            entries = [entry for report in reports for entry in report["digests"]]
            wrong, unknown = await asyncio.to_thread(weight_audit.compare, layout, entries, digests)
            if wrong:
                log.error("%s: %d tensors aren't those of %s, %s first", self.name, len(wrong), version, wrong[0])
                await self._pause.distrust()
            lacks, skipped = self._state.lacks, self._state.skipped
            unknown = [name for name in unknown if adapter_of(name) not in lacks and name not in skipped]
            return Audit(version, wrong, unknown, lacks)

    async def _meet(self) -> list[Report]:
        """Ask the server for its number of workers, and the workers for their versions. A restart discards earlier
        findings about the server.
        """
        # The label fails soon if the engine hangs, whereas ``init`` may take long to learn the mapping.
        await self._server.label()
        await self._ranks.recount()
        began_at = asyncio.get_running_loop().time()
        reports = await self._ranks.init()
        self.pulse.met(began_at)
        # One sparse rank changes what the engine samples. A pipeline's first rank may have dense layers alone.
        follows = any(r.get("follows") is True for r in reports)
        lacks = {str(name) for r in reports for name in r.get("lacks", ())}
        skipped, unknown = self._accounts([r["accounts"] for r in reports if "accounts" in r])
        incarnations = {r["rank"]: r["incarnation"] for r in reports}
        self._state.meet(incarnations, follows=follows, lacks=lacks, skipped=skipped)
        if unknown:
            raise LocalError(
                f"{self.name}: the run is refused: the engine reads nothing from {len(unknown)} of its tensors, the "
                f"first {unknown[0]}; start the engine on a folder of the run's newest version, or leave the tensors "
                "out of the run"
            )
        return reports

    def _accounts(self, packed: list[bytes]) -> tuple[list[str], list[str]]:
        """Names of the run's tensors that all ranks together skip, and that they do not know."""
        if not packed:  # workers of an earlier release do not account for tensors
            return [], []
        tensors = self._preparation.layout().tensors
        found = list(zip(tensors, tensor_accounts.together(packed, len(tensors)), strict=True))
        skipped, unknown = ([t.name for t, a in found if a is k] for k in (Account.SKIPPED, Account.UNKNOWN))
        return skipped, unknown

    async def _begin(self, reports: list[Report]) -> None:
        """Open vLLM's update session, unless the workers report an open one: a peer may have died during an update."""
        opened = {bool(r["open"]) for r in reports}
        if len(opened) > 1:
            raise LocalError(f"{self.name}: its workers disagree whether an update is under way; restart the server")
        if opened == {False}:
            await self._server.begin()

    @contextlib.asynccontextmanager
    async def _unready_on_error(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, StillRunningError):
                self._state.fail()
            self._state.drop()
            self._forget_process(error)
            raise

    @contextlib.asynccontextmanager
    async def _noticing(self) -> AsyncIterator[None]:
        """Mark a server as not ready while it is out of reach."""
        try:
            yield
        except P2PCastError as error:
            self._state.lose_contact()
            self._forget_process(error)
            raise

    def _forget_process(self, error: BaseException) -> None:
        """Nothing listens, so the engine that held the version has ended: its successor begins with other weights."""
        if isinstance(error, ServerAwayError):
            self._state.lose_version()
