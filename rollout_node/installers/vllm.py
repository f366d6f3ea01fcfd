"""Installs into a vLLM server whose workers run ``rollout_node.vllm_plugin``: vLLM's own routes carry the commands, the
install socket the data and the workers' reports.

Promise: staging goes on while the engine generates, the pause holds the commit alone, no request fails. All ranks switch
or none: if one can't, the others take their values back. The engine is resumed whatever happens. An engine that holds no
known version (just started, restarted, in doubt) is filled densely in ``stage``, under a pause, and unready till then.

``kv="recompute"``: running requests compute their keys and values anew and the prefix cache is emptied, so what follows a
switch comes from the new weights alone. ``kv="keep"`` leaves both (for clients that salt by version, and as a choice).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from p2pcast.version import Version
from rollout_node.install_socket import Expectation, InstallSocket, Report
from rollout_node.installers.base import CommitReport
from rollout_node.vllm_plugin import audit

log = logging.getLogger(__name__)

_KV_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_KV_CONFIG = re.compile(r"^vllm:cache_config_info\{.*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. ``init`` covers learning the mapping, ``prepare`` the staging, ``dense`` a whole model under the pause."""

    request: float = 30.0
    init: float = 300.0
    prepare: float = 300.0
    commit: float = 60.0
    dense: float = 1800.0


class VllmInstaller:
    """One server at ``url``. ``run``: the run's id, for versions of another run mean nothing. ``ranks``: workers that
    report to this peer; None: all of the server's.

    ``driver="external"``: somebody else pauses and resumes the engine around ``commit``, and has it paused for the
    first ``stage`` too.
    """

    def __init__(
        self,
        url: str,
        socket: InstallSocket,
        *,
        run: str = "",
        name: str | None = None,
        kv: Literal["recompute", "keep"] = "recompute",
        driver: Literal["peer", "external"] = "peer",
        ranks: int | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.name = name or f"vllm:{url}"
        self._url = url.rstrip("/")
        self._socket, self._run = socket, run
        self._kv, self._driver = kv, driver
        self._ranks = ranks
        self._deadlines = deadlines or Deadlines()
        self._engine = secrets.token_hex(8)
        self._http: aiohttp.ClientSession | None = None
        self._committed: Version | None = None
        self._staged: Version | None = None
        self._installed: CommitReport | None = None
        self._ready = False
        self._busy = asyncio.Lock()

    @property
    def committed(self) -> Version | None:
        return self._committed

    @property
    def ready(self) -> bool:
        return self._ready

    # -- the interface

    async def start(self) -> None:
        """Raises RetryableError while the server is down, LocalError when it wasn't started for p2pcast."""
        if self._http is None:
            # A connection a command: the server closes idle ones when it likes, and a command that meets that is lost.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        await self._get("/health")
        if self._ranks is None:
            self._ranks = int((await self._get("/get_world_size"))["world_size"])
        await self._init()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def stage(self, version: Version, shadow: Path) -> None:
        async with self._busy, self._unready_on_error():
            self._staged = self._installed = None
            if self._http is None or self._ranks is None:
                raise LocalError(f"{self.name}: not started")
            reports = await self._init()
            if {r["held"] for r in reports} != {str(self._committed)}:
                self._ready, self._committed = False, None
            elif version == self._committed:
                self._staged, self._installed = version, CommitReport(0.0, 0)
                return
            await self._begin(reports)
            try:
                reports = await self._prepare(version)
            except IntegrityError:
                # A rank whose weights weren't what it thought has forgotten its version; this time it asks for all.
                self._ready = False
                reports = await self._prepare(version)
            if any(r["install"] == "dense" for r in reports):
                self._ready = False
                self._installed = await self._switch(version, self._deadlines.dense)
            self._staged = version

    async def commit(self, version: Version) -> CommitReport:
        async with self._busy, self._unready_on_error():
            if self._staged != version:
                raise LocalError(f"{self.name}: {version} isn't staged, {self._staged or 'nothing'} is")
            report = self._installed or await self._switch(version, self._deadlines.commit)
            self._committed, self._ready = version, True
            self._staged = self._installed = None
            return report

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> tuple[list[str], list[str]]:
        """Compare the live weights, in place, with the digest of each tensor (by number): the names that differ, and
        those that can't be read in place. Not to be called while a version is staged."""
        async with self._busy, self._unready_on_error():
            version = self._committed
            if version is None or self._staged is not None:
                raise LocalError(f"{self.name}: an audit needs a committed version and no other staged")
            await self._begin(await self._init())
            try:
                reports = await self._phase("audit", version, self._deadlines.prepare)
            finally:
                await self._finish(None)
            entries = [entry for report in reports for entry in report["digests"]]
            return audit.compare(layout, entries, digests)

    # -- steps

    async def _init(self) -> list[Report]:
        """Name the engine to its workers; their reports tell what they hold."""
        with self._expecting("init", None) as expectation:
            info = {"engine": self._engine, "run": self._run}
            await self._post("/init_weight_transfer_engine", {"init_info": info}, self._deadlines.init)
            return await self._collect(expectation, "init", self._deadlines.request)

    async def _begin(self, reports: Iterable[Report]) -> None:
        """Open vLLM's update session, unless the workers say that it is (a peer may have died in the middle).

        It is never tried in vain: with several workers, vLLM leaves an answer unread after an error, and gives it to
        the next command.
        """
        if not any(r["open"] for r in reports):
            await self._post("/start_weight_update")

    async def _finish(self, version: Version | None) -> None:
        await self._post("/finish_weight_update", {"weight_version": str(version)} if version else {})

    async def _prepare(self, version: Version) -> list[Report]:
        return await self._phase("prepare", version, self._deadlines.prepare)

    async def _phase(self, phase: str, version: Version, deadline_s: float) -> list[Report]:
        """One command to all ranks and their reports. Raises the first error that a rank reports."""
        with self._expecting(phase, version) as expectation:
            await self._post("/update_weights", {"update_info": {"phase": phase, "version": str(version)}}, deadline_s)
            return await self._collect(expectation, phase, deadline_s)

    async def _switch(self, version: Version, deadline_s: float) -> CommitReport:
        """Pause, commit on all ranks, finish, resume. Raises after undoing what can be undone."""
        tokens = await self._cached_tokens() if self._kv == "recompute" else 0
        began = time.monotonic()
        async with self._paused():
            paused = time.monotonic()
            try:
                reports = await self._phase("commit", version, deadline_s)
            except (P2PCastError, asyncio.CancelledError):
                await self._undo(version)
                raise
            written = time.monotonic()
            await self._finish(version)
        ended = time.monotonic()
        detail = {
            "pausing_s": round(paused - began, 6),
            "writing_s": round(written - paused, 6),
            "resuming_s": round(ended - written, 6),
            "worker_s": max(r["took_us"] for r in reports) / 1e6,
        }
        return CommitReport(ended - began, tokens, detail)

    async def _undo(self, version: Version) -> None:
        """Have every rank take its old values back; a failure here leaves ranks without a version, which ``stage`` sees."""
        try:
            await self._phase("abort", version, self._deadlines.prepare)
            await self._finish(None)
        except P2PCastError as error:
            log.warning("%s: undoing %s: %s", self.name, version, error)

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        if self._driver == "external":
            yield
            return
        clear = "true" if self._kv == "recompute" else "false"
        try:
            await self._post(f"/pause?mode=keep&clear_cache={clear}", None, self._deadlines.commit)
            yield
        finally:
            await self._post("/resume")

    async def _cached_tokens(self) -> int | None:
        """Tokens in the blocks that running requests hold, rounded up to blocks; from the server's metrics."""
        try:
            text = await self._get_text("/metrics")
        except P2PCastError:
            return None
        usage, config = _KV_USAGE.findall(text), _KV_CONFIG.search(text)
        sizes = dict(re.findall(r'[{,](block_size|num_gpu_blocks)="(\d+)"', config[0])) if config else {}
        if not usage or len(sizes) != 2:
            return None
        return round(sum(float(u) for u in usage) * int(sizes["block_size"]) * int(sizes["num_gpu_blocks"]))

    # -- reports and HTTP

    @contextlib.contextmanager
    def _expecting(self, phase: str, version: Version | None) -> Any:
        text = str(version) if version else None

        def matches(report: Report) -> bool:
            return (report["engine"], report["phase"], report["version"]) == (self._engine, phase, text)

        with self._socket.expect(matches, self._ranks or 1) as expectation:
            yield expectation

    async def _collect(self, expectation: Expectation, phase: str, deadline_s: float) -> list[Report]:
        try:
            reports = await expectation.wait(deadline_s)
        except TimeoutError:
            raise RetryableError(
                f"{self.name}: {expectation.missing} of {self._ranks} workers did not report {phase} within {deadline_s:g} s; "
                "do they have this peer's socket in P2PCAST_SOCK, and is it the same host?"
            ) from None
        for report in reports:
            if report["error"] is not None:
                kind = report.get("kind")
                make = next((k for k in (IntegrityError, RetryableError) if k.wire_code == kind), LocalError)
                raise make(f"{self.name}: rank {report['rank']}, {phase}: {report['error']}")
        return reports

    @contextlib.asynccontextmanager
    async def _unready_on_error(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            self._ready = False
            self._staged = self._installed = None
            raise

    async def _get(self, path: str) -> Any:
        text = await self._get_text(path)
        return json.loads(text) if text else None

    async def _get_text(self, path: str) -> str:
        return await self._request("GET", path, None, self._deadlines.request)

    async def _post(self, path: str, body: dict[str, Any] | None = None, deadline_s: float | None = None) -> None:
        await self._request("POST", path, body, deadline_s or self._deadlines.request)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> str:
        if self._http is None:
            raise LocalError(f"{self.name}: not started")
        where = f"{self.name}: {method} {path.split('?')[0]}"
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with self._http.request(method, self._url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status == 200:
                    return text
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            reason = str(error) or f"no answer within {deadline_s:g} s"
            raise RetryableError(f"{where}: {reason}; is the server up?") from None
        hint = "; start it with VLLM_SERVER_DEV_MODE=1" if response.status == 404 else ""
        raise LocalError(f"{where}: status {response.status}: {text[:300]}{hint}")
