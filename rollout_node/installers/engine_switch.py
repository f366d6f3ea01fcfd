"""The switch of a vLLM engine to a prepared version: pause, commit on all ranks, confirm, resume.

Promises:

- **Mixed weights are never served.** The engine is resumed only after every rank has confirmed one and the same
  version: all committed, or all rolled back (``switch_rollback``). A rank confirms a version by a digest of the values
  read back after writing (``in_engine.install_proof``).
- Pause, commit and resume are one command to vLLM's engine core (``vllm_plugin.engine_core``). They are separate
  commands over vLLM's own routes if another process pauses the engine, or with several cores (data parallelism).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import recomputes
from rollout_node.installers.engine_pause import EnginePause
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_socket import Report
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.installer import CommitReport
from rollout_node.installers.rank_reports import FalseReportError, Ranks, raise_first
from rollout_node.installers.safe_point import StillRunningError, SwitchPoint
from rollout_node.installers.switch_rollback import SwitchRollback

log = logging.getLogger("p2pcast.peer")


class EngineSwitch:
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
        self._rollback = SwitchRollback(server, ranks, state, pause, point)

    async def switch(self, version: Version, deadline_s: float) -> CommitReport:
        """Pause, commit on all ranks, resume, finish. Raises after undoing what can be undone."""
        paused = await self._server.is_paused()
        ours = self._pause.driver == "peer" and (self._state.pausing or not paused)
        reports = await self._ranks.init(pausing=ours)
        for report in reports:
            if not report["open"] or report["prepared"] != str(version):
                raise RetryableError(
                    f"{self._name}: rank {report['rank']} isn't prepared for {version} any more; it is staged again"
                )
        self._pause.note(ours=ours)
        waited = await self._point.reach(ours=ours, paused=paused, resume=self._pause.end)
        tokens = await self._server.cached_tokens() if recomputes(self._pause.kv) else 0
        began_unix_s = time.time()
        self._point.writing()
        switch = self._switch_in_core if self._in_core(reports) else self._switch_by_routes
        took = await switch(version, ours, deadline_s) | waited
        detail = {"began_unix_s": round(began_unix_s, 6)} | {name: round(seconds, 6) for name, seconds in took.items()}
        return CommitReport(took["paused_s"], tokens, detail, dense=self._state.dense)

    def _in_core(self, reports: Sequence[Report]) -> bool:
        """Whether the engine core can switch by itself (``vllm_plugin.engine_core``), and all of its ranks report here.
        For vLLM, data parallel ranks of a dense model are separate engines with a core each: then no rank counts all
        ranks.
        """
        alone = all(r["core"] and r["ranks"] == self._ranks.count for r in reports)
        return alone and self._pause.driver == "peer" and self._ranks.are_all

    async def _switch_in_core(self, version: Version, ours: bool, deadline_s: float) -> dict[str, float]:
        """One command, after which the engine runs with the new version, or is paused. Returns durations by name."""
        began = time.monotonic()
        order = {
            "version": str(version),
            "nonce": secrets.token_hex(4),
            "marks": {str(rank): mark for rank, mark in self._state.marks.items()},
            "clear_cache": recomputes(self._pause.kv),
            "ours": ours,
            "until_unix_s": time.time() + deadline_s,
        }
        try:
            reports, core = await self._server.switch(order, deadline_s)
            if len(reports) < self._ranks.count:
                raise RetryableError(
                    f"{self._name}: {self._ranks.count - len(reports)} workers gave no report of the commit"
                )
            raise_first(self._name, reports, "commit")
            self._confirm(version, reports)
            if ours and not core["resumed"]:
                raise RetryableError(f"{self._name}: switching to {version} took longer than {deadline_s:g} s")
        except StillRunningError:  # nothing was written
            if self._state.committed is not None:
                self._point.written()
            if not self._state.uncertain:
                await self._pause.end()
            raise
        except BaseException as error:
            await self._rollback.roll_back(version, error)
            raise
        ended = time.monotonic()
        self._state.trust()
        self._pause.ended_by_core()
        await self._finish()
        return {
            "paused_s": core["pause_us"] / 1e6,
            "command_s": ended - began,
            "worker_s": max(r["took_us"] for r in reports) / 1e6,
        }

    async def _switch_by_routes(self, version: Version, ours: bool, deadline_s: float) -> dict[str, float]:
        """Switch with vLLM's own commands, for an engine that another process pauses, or that has several cores."""
        began = time.monotonic()
        try:
            if self._pause.driver == "peer":
                await self._pause.begin(ours=ours)
            elif recomputes(self._pause.kv):
                await self._server.clear_caches()
            paused = time.monotonic()
            reports = await self._ranks.command("commit", version, deadline_s)
            self._confirm(version, reports)
        except BaseException as error:
            await self._rollback.roll_back(version, error)
            raise
        written = time.monotonic()
        self._state.trust()
        try:
            await self._server.set_label(str(version))
        finally:
            await self._pause.end()
        ended = time.monotonic()
        await self._finish()
        return {
            "paused_s": ended - began,
            "pausing_s": paused - began,
            "writing_s": written - paused,
            "resuming_s": ended - written,
            "worker_s": max(r["took_us"] for r in reports) / 1e6,
        }

    def _confirm(self, version: Version, reports: Sequence[Report]) -> None:
        """Every rank holds the values that it prepared."""
        for report in reports:
            rank, mark = report["rank"], report.get("mark")
            if report["held"] != str(version) or mark is None or mark != self._state.marks.get(rank):
                raise FalseReportError(
                    f"{self._name}: rank {rank} says that it holds {report['held']}, but the values prepared for "
                    f"{version} are not there"
                )

    async def _finish(self) -> None:
        """Close vLLM's session."""
        try:
            await self._server.finish()
        except P2PCastError as error:  # the version is in use already, and the next stage finds the session open
            log.warning("%s: %s", self._name, error)
