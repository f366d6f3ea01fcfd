"""Installs into a vLLM server whose workers run ``rollout_node.vllm_plugin``. Commands go over vLLM's own routes; data
and the workers' reports go over the install socket.

Promises:

- The engine generates while a version is staged; the engine is paused for the commit only; no request fails.
- Pause, commit and resume are one command to vLLM's engine core (``vllm_plugin.engine_core``). They are separate
  commands over vLLM's own routes if another process pauses the engine, or with several cores (data parallelism).
- **Mixed weights are never served.** An engine is resumed only after every rank has confirmed one and the same version:
  all committed, or all rolled back. A rank confirms a version by a digest of the values read back after writing
  (``in_engine.install_proof``). Otherwise the engine stays paused, its requests wait, and the next ``stage`` writes the
  whole state under the same pause.
- The ranks note this peer's pause before the pause begins. If the peer dies meanwhile, its successor resumes the engine
  when all ranks agree, and repairs the engine when they do not.
- A pause by another process is never ended here. With ``driver="external"`` the installer neither pauses nor resumes:
  ``commit`` requires a paused engine, and may write the whole state there (``commit_needs_shadow``).

``kv``: ``p2pcast.rollouts.kv_policy``. ``safe_point``: ``safe_point.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Literal

from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from p2pcast.rollouts.kv_policy import KvPolicy, recomputes
from p2pcast.version import Version
from rollout_node.in_engine import weight_audit
from rollout_node.installers.install_socket import Expectation, InstallSocket, Report
from rollout_node.installers.installer import Audit, CommitReport
from rollout_node.installers.safe_point import SafePoint, StillRunningError, SwitchPoint
from rollout_node.installers.vllm_server import Deadlines, VllmServer

log = logging.getLogger("p2pcast.peer")


class _LieError(IntegrityError):
    """A rank's report and its weights differ."""


class VllmInstaller:
    """One server at ``url``. ``run``: the run's id; versions of other runs are ignored. ``ranks``: number of workers
    that report to this peer; None: all of the server's. ``driver="external"``: another process pauses and resumes the
    engine around ``commit``."""

    def __init__(
        self,
        url: str,
        socket: InstallSocket,
        *,
        run: str = "",
        name: str | None = None,
        kv: KvPolicy = "recompute",
        driver: Literal["peer", "external"] = "peer",
        safe_point: SafePoint = "step",
        ranks: int | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.name = name or f"vllm:{url}"
        self._deadlines = deadlines or Deadlines()
        self._server = VllmServer(url, self.name, self._deadlines)
        self._point = SwitchPoint(self._server, self.name, safe_point, self._deadlines.drain)
        self._socket, self._run = socket, run
        self._kv, self._driver = kv, driver
        self._ranks_given, self._ranks = ranks, ranks or 1
        self._engine = secrets.token_hex(8)
        self._busy = asyncio.Lock()
        self.committed: Version | None = None
        self.ready = False
        self._away = False
        """``ready`` is False only because the server could not be reached."""
        self._staged: Version | None = None
        self._installed: CommitReport | None = None
        self._dense = False
        self._marks: dict[int, int] = {}
        self._incarnations: dict[int, str] = {}
        self._uncertain = False
        """Some rank's report is not reliable: only a dense install restores a known version."""
        self._pausing = False
        """If the engine is paused, this peer paused it."""
        self._layout: tuple[bytes, Layout] | None = None

    @property
    def stretch(self) -> str | None:
        return self._point.stretch

    @property
    def commit_needs_shadow(self) -> bool:
        return self._staged is not None and self._dense and self._installed is None

    # -- the interface

    async def start(self) -> None:
        """Raises RetryableError while the server is down, LocalError when it wasn't started for p2pcast."""
        self._server.open()
        await self._server.health()
        await self._meet()

    async def close(self) -> None:
        await self._server.close()

    async def check(self) -> None:
        async with self._busy, self._noticing():
            label = await self._server.label()
            if self.committed is None:
                return
            if label != str(self.committed):  # another server, or another process set the label: ask the ranks
                held = _alike(await self._meet())
                if held != self.committed:
                    self._lose_version()
                    log.warning(
                        "%s: holds %s now: restarted, or changed by another process", self.name, held or "nothing"
                    )
                    return
                await self._server.set_label(str(held))
            if self._away:
                self.ready, self._away = True, False

    async def stage(self, version: Version, shadow: Path) -> None:
        async with self._busy, self._unready_on_error():
            self._drop()
            reports = await self._meet()
            held = _alike(reports)
            if held is None or held != self.committed:
                self._lose_version()
            self._uncertain |= any(r["doubtful"] for r in reports) or len({r["held"] for r in reports}) > 1
            await self._begin(reports)
            if self._driver == "peer":
                await self._settle(reports, held)
            if held == version and not self._uncertain:
                if await self._server.label() != str(version):
                    await self._server.set_label(str(version))
                await self._server.finish()
                self._staged, self._installed = version, CommitReport(0.0, 0)
                return
            prepared = await self._prepare(version)
            self._dense = any(r["install"] == "dense" for r in prepared)
            if self._dense:
                self.ready = False
                if self._driver == "peer":
                    self._installed = await self._switch(version, self._deadlines.dense)
            self._staged = version

    async def commit(self, version: Version) -> CommitReport:
        async with self._busy:
            if self._staged != version:
                raise LocalError(f"{self.name}: {version} isn't staged, {self._staged or 'nothing'} is")
            if self._driver == "external" and self._installed is None and not await self._server.is_paused():
                raise RetryableError(
                    f"{self.name}: not paused; with --driver external, pause the engine around the commit"
                )
            async with self._unready_on_error():
                deadline_s = self._deadlines.dense if self._dense else self._deadlines.commit
                report = self._installed or await self._switch(version, deadline_s)
                self.committed, self.ready, self._away = version, True, False
                self._point.written()
                self._drop()
                return report

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        async with self._busy, self._noticing():
            version = self.committed
            if version is None:
                raise LocalError(f"{self.name}: nothing is committed, so there is nothing to audit")
            self._drop()
            reports = await self._meet()
            if _alike(reports) != version:
                self._lose_version()
                raise RetryableError(f"{self.name}: no longer holds {version}; it is installed anew")
            await self._begin(reports)
            try:
                reports = await self._phase("audit", version, self._deadlines.prepare)
            finally:
                await self._server.finish()
            entries = [entry for report in reports for entry in report["digests"]]
            wrong, unknown = await asyncio.to_thread(weight_audit.compare, layout, entries, digests)
            if wrong:
                log.error("%s: %d tensors aren't those of %s, %s first", self.name, len(wrong), version, wrong[0])
                await self._distrust()
            return Audit(version, wrong, unknown)

    # -- the engine's state

    async def _meet(self) -> list[Report]:
        """Ask the server for its number of workers, and the workers for their versions. A restart discards earlier
        findings about the server.
        """
        await (
            self._server.label()
        )  # fails soon if the engine hangs, whereas ``init`` may take long to learn the mapping
        self._ranks = self._ranks_given or await self._server.world_size()
        reports = await self._init()
        incarnations = {r["rank"]: r["incarnation"] for r in reports}
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            self._uncertain = self._pausing = False
        return reports

    async def _init(self, *, pausing: bool = False, forget: bool = False) -> list[Report]:
        with self._expecting("init", None) as (expectation, nonce):
            info = {"engine": self._engine, "run": self._run, "nonce": nonce, "pausing": pausing, "forget": forget}
            await self._server.init(info)
            return await self._collect(expectation, "init", self._deadlines.report)

    async def _begin(self, reports: list[Report]) -> None:
        """Open vLLM's update session, unless the workers report an open one: a peer may have died during an update."""
        opened = {bool(r["open"]) for r in reports}
        if len(opened) > 1:
            raise LocalError(f"{self.name}: its workers disagree whether an update is under way; restart the server")
        if opened == {False}:
            await self._server.begin()

    async def _settle(self, reports: list[Report], held: Version | None) -> None:
        """End the pause of a peer that died, or this peer's after a failure, if all ranks agree. Pause the engine if
        a rank's version is in doubt.
        """
        paused = await self._server.is_paused()
        self._pausing |= paused and any(r["pausing"] for r in reports)
        if self._uncertain:
            log.error("%s: its ranks don't hold one version; it is paused until they do", self.name)
            await self._pause()
        elif paused and self._pausing and held is not None:
            log.warning("%s: was left paused, and is resumed at %s", self.name, held)
            await self._server.set_label(str(held))
            await self._resume()

    async def _distrust(self) -> None:
        """Ignore the ranks' versions, and pause the engine, until a dense install has been confirmed."""
        self._uncertain = True
        self._lose_version()
        await self._init(forget=True)
        if self._driver == "peer":
            await self._pause()

    def _lose_version(self) -> None:
        self.committed, self.ready, self._away = None, False, False
        self._point.writing()
        self._drop()

    def _drop(self) -> None:
        self._staged = self._installed = None
        self._dense = False

    # -- prepare, commit, abort

    async def _prepare(self, version: Version) -> list[Report]:
        """Stage at every rank. If the live weights differ from the version that the ranks named, stage the whole
        state.
        """
        if not self._uncertain:
            try:
                return await self._prepare_once(version, whole=False)
            except IntegrityError as error:
                if not isinstance(error, _LieError) and _alike(await self._init()) is not None:
                    raise  # the version is at fault: the engine keeps its present version
                log.error("%s", error)
                await self._distrust()
        return await self._prepare_once(version, whole=True)

    async def _prepare_once(self, version: Version, *, whole: bool) -> list[Report]:
        reports = await self._phase("prepare", version, self._deadlines.prepare, whole=whole)
        self._marks = {r["rank"]: r["mark"] for r in reports}
        sparse = [r for r in reports if r["install"] == "sparse"]
        if len({r["from"] for r in sparse}) > 1 or len({str(r["expected"]) for r in sparse}) > 1:
            raise _LieError(f"{self.name}: the ranks don't build {version} on the same version")
        if sparse and len(sparse) == len(reports):
            entries = [entry for r in sparse for entry in r["grown"]]
            expected = dict(sparse[0]["expected"])
            wrong, _ = await asyncio.to_thread(weight_audit.compare, self._known_layout(), entries, expected)
            if wrong:
                held = sparse[0]["from"]
                raise _LieError(
                    f"{self.name}: {wrong[0]} ({len(wrong)} tensors in all): the ranks' live values differ from {held}"
                )
        return reports

    def _known_layout(self) -> Layout:
        document = self._socket.layout_document()
        if self._layout is None or self._layout[0] != document:
            self._layout = document, Layout.from_document(document)
        return self._layout[1]

    async def _switch(self, version: Version, deadline_s: float) -> CommitReport:
        """Pause, commit on all ranks, resume, finish. Raises after undoing what can be undone."""
        paused = await self._server.is_paused()
        ours = self._driver == "peer" and (self._pausing or not paused)
        ranks = await self._init(pausing=ours)
        for report in ranks:
            if not report["open"] or report["prepared"] != str(version):
                raise RetryableError(
                    f"{self.name}: rank {report['rank']} isn't prepared for {version} any more; it is staged again"
                )
        self._pausing = ours
        waited = await self._point.reach(ours=ours, paused=paused, resume=self._resume)
        tokens = await self._server.cached_tokens() if recomputes(self._kv) else 0
        began_unix_s = time.time()
        self._point.writing()
        switch = self._switch_in_core if self._in_core(ranks) else self._switch_by_routes
        took = await switch(version, ours, deadline_s) | waited
        detail = {"began_unix_s": round(began_unix_s, 6)} | {name: round(seconds, 6) for name, seconds in took.items()}
        return CommitReport(took["paused_s"], tokens, detail, dense=self._dense)

    def _in_core(self, ranks: list[Report]) -> bool:
        """Whether the engine core can switch by itself (``vllm_plugin.engine_core``), and all of its ranks report here.
        For vLLM, data parallel ranks of a dense model are separate engines with a core each: then no rank counts all
        ranks.
        """
        alone = all(r["core"] and r["ranks"] == self._ranks for r in ranks)
        return alone and self._driver == "peer" and self._ranks_given is None

    async def _switch_in_core(self, version: Version, ours: bool, deadline_s: float) -> dict[str, float]:
        """One command, after which the engine runs with the new version, or is paused. Returns durations by name."""
        began = time.monotonic()
        order = {
            "version": str(version),
            "nonce": secrets.token_hex(4),
            "marks": {str(rank): mark for rank, mark in self._marks.items()},
            "clear_cache": recomputes(self._kv),
            "ours": ours,
            "until_unix_s": time.time() + deadline_s,
        }
        try:
            reports, core = await self._server.switch(order, deadline_s)
            if len(reports) < self._ranks:
                raise RetryableError(f"{self.name}: {self._ranks - len(reports)} workers gave no report of the commit")
            self._raise_first(reports, "commit")
            self._confirm(version, reports)
            if ours and not core["resumed"]:
                raise RetryableError(f"{self.name}: switching to {version} took longer than {deadline_s:g} s")
        except BaseException as error:
            await self._undo(version, error)
            raise
        ended = time.monotonic()
        self._uncertain = self._pausing = False
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
            if self._driver == "peer":
                await self._pause(ours=ours)
            elif recomputes(self._kv):
                await self._server.clear_caches()
            paused = time.monotonic()
            reports = await self._phase("commit", version, deadline_s)
            self._confirm(version, reports)
        except BaseException as error:
            await self._undo(version, error)
            raise
        written = time.monotonic()
        self._uncertain = False
        try:
            await self._server.set_label(str(version))
        finally:
            await self._resume()
        ended = time.monotonic()
        await self._finish()
        return {
            "paused_s": ended - began,
            "pausing_s": paused - began,
            "writing_s": written - paused,
            "resuming_s": ended - written,
            "worker_s": max(r["took_us"] for r in reports) / 1e6,
        }

    async def _finish(self) -> None:
        """Close vLLM's session."""
        try:
            await self._server.finish()
        except P2PCastError as error:  # the version is in use already, and the next stage finds the session open
            log.warning("%s: %s", self.name, error)

    def _confirm(self, version: Version, reports: list[Report]) -> None:
        for report in reports:
            rank, mark = report["rank"], report.get("mark")
            if report["held"] != str(version) or mark is None or mark != self._marks.get(rank):
                raise _LieError(
                    f"{self.name}: rank {rank} says that it holds {report['held']}, but the values prepared for "
                    f"{version} are not there"
                )

    async def _undo(self, version: Version, cause: BaseException) -> None:
        """Restore every rank's old values. The engine resumes if all ranks confirm; else it stays paused."""
        try:
            held = _alike(await self._phase("abort", version, self._deadlines.undo))
            if held is None or (held == version and isinstance(cause, _LieError)):
                await self._distrust()
                raise IntegrityError("its ranks hold different versions")
            if held != self.committed:
                self._lose_version()
                await self._server.set_label(str(held))
            else:
                self._point.written()
            await self._resume()
            await self._server.finish()
        except P2PCastError as error:
            self._lose_version()
            stays = "it must stay paused" if self._driver == "external" else "it stays paused"
            log.error("%s: %s could not be taken back (%s): %s until it is repaired", self.name, version, error, stays)

    async def _pause(self, *, ours: bool | None = None) -> None:
        """``ours``: whether this peer's pause was noted at the ranks already; None: find out, and note it."""
        if ours is None:
            ours = self._pausing or not await self._server.is_paused()
            if ours and not self._pausing:
                await self._init(pausing=True)
        self._pausing = ours
        await self._server.pause(clear_cache=recomputes(self._kv))

    async def _resume(self) -> None:
        if self._pausing:
            await self._server.resume()
            self._pausing = False

    # -- reports

    async def _phase(self, phase: str, version: Version, deadline_s: float, *, whole: bool = False) -> list[Report]:
        """One command to all ranks and their reports. Raises the first error that a rank reports."""
        with self._expecting(phase, version) as (expectation, nonce):
            info = {"phase": phase, "version": str(version), "nonce": nonce, "whole": whole}
            await self._server.update(info, deadline_s)
            in_thread = phase in ("prepare", "audit")  # in other phases, ranks report before the server answers
            return await self._collect(expectation, phase, deadline_s if in_thread else self._deadlines.report)

    @contextlib.contextmanager
    def _expecting(self, phase: str, version: Version | None) -> Iterator[tuple[Expectation, str]]:
        text, nonce = str(version) if version else None, secrets.token_hex(4)
        wanted = (self._engine, phase, text, nonce)

        def matches(report: Report) -> bool:
            return (report["engine"], report["phase"], report["version"], report.get("nonce")) == wanted

        with self._socket.expect(matches, self._ranks) as expectation:
            yield expectation, nonce

    async def _collect(self, expectation: Expectation, phase: str, deadline_s: float) -> list[Report]:
        try:
            reports = await expectation.wait(deadline_s)
        except TimeoutError:
            elsewhere = f" ({self._socket.elsewhere()})" if self._socket.elsewhere else ""
            raise RetryableError(
                f"{self.name}: {expectation.missing} of {self._ranks} workers did not report {phase} within"
                f" {deadline_s:g} s,"
                f" ranks {', '.join(map(str, expectation.missing_ranks))}{elsewhere}; "
                "do they have this peer's socket in P2PCAST_SOCK, and is it the same host?"
            ) from None
        self._raise_first(reports, phase)
        return reports

    def _raise_first(self, reports: list[Report], phase: str) -> None:
        """The first error that a rank reports."""
        for report in reports:
            if report["error"] is not None:
                kind = report.get("kind")
                make = next((k for k in (IntegrityError, RetryableError) if k.wire_code == kind), LocalError)
                raise make(f"{self.name}: rank {report['rank']}, {phase}: {report['error']}")

    @contextlib.asynccontextmanager
    async def _unready_on_error(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, StillRunningError):
                self.ready = self._away = False
            self._drop()
            raise

    @contextlib.asynccontextmanager
    async def _noticing(self) -> AsyncIterator[None]:
        """Mark a server as not ready while it is out of reach."""
        try:
            yield
        except P2PCastError:
            self._away |= self.ready
            self.ready = False
            raise


def _alike(reports: list[Report]) -> Version | None:
    """The one version that every rank holds."""
    held = {r["held"] for r in reports}
    found = held.pop() if len(held) == 1 else None
    return Version.parse(found) if found else None
