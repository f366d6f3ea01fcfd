"""Commands to all ranks of a vLLM engine, and the reports with which the ranks answer over the install socket.

Guarantees:

- A report answers exactly one command: its engine, phase, version and nonce must match the command's.
- A command returns one report per rank, or raises. A missing report is an error that names the ranks.
- A rank's error is raised as the kind named in its report (``install_instructions.raise_first``).

``install_machine`` decides whether a report is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Final

from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_instructions import Report, raise_first
from rollout_node.installers.install_socket import Expectation, InstallSocket
from rollout_node.installers.install_state import ServerAwayError

WATCH_S: Final = 2.0
"""Seconds between checks of the server while its ranks work."""


class Ranks:
    """``run``: the run's id; ranks ignore versions of other runs. ``given``: number of ranks that report to this peer;
    None means all of the server's. Error messages start with ``name``, the server's name.
    """

    def __init__(self, server: EngineServer, socket: InstallSocket, run: str, given: int | None) -> None:
        self._server, self._socket, self._run = server, socket, run
        self._given, self.count = given, given or 1
        self.engine = secrets.token_hex(8)

    @property
    def name(self) -> str:
        return self._server.name

    async def recount(self) -> None:
        self.count = self._given or await self._server.world_size()

    async def init(self, *, pausing: bool = False, forget: bool = False) -> list[Report]:
        """Return each rank's report of its version. ``pausing``: the ranks note that this peer is about to pause the
        engine. ``forget``: they report no version until the next install.
        """
        with self._expecting("init", None) as (expectation, nonce):
            info = {"engine": self.engine, "run": self._run, "nonce": nonce, "pausing": pausing, "forget": forget}
            await self._server.init(info)
            return await self._collect(expectation, "init", self._server.deadlines.report)

    async def command(self, phase: str, version: Version, deadline_s: float, *, whole: bool = False) -> list[Report]:
        """Send ``prepare``, ``commit``, ``abort`` or ``audit`` to all ranks. Raises the first error reported."""
        with self._expecting(phase, version) as (expectation, nonce):
            info = {"phase": phase, "version": str(version), "nonce": nonce, "whole": whole}
            await self._server.update(info, deadline_s)
            if phase in ("prepare", "audit"):  # in other phases, ranks report before the server answers
                return await self._collect_while_up(expectation, phase, deadline_s)
            return await self._collect(expectation, phase, self._server.deadlines.report)

    @contextlib.contextmanager
    def _expecting(self, phase: str, version: Version | None) -> Iterator[tuple[Expectation, str]]:
        text, nonce = str(version) if version else None, secrets.token_hex(4)
        wanted = (self.engine, phase, text, nonce)

        def matches(report: Report) -> bool:
            return (report["engine"], report["phase"], report["version"], report.get("nonce")) == wanted

        with self._socket.expect(matches, self.count) as expectation:
            yield expectation, nonce

    async def _collect_while_up(self, expectation: Expectation, phase: str, deadline_s: float) -> list[Report]:
        """Like ``_collect``, but stop when nothing listens at the server's address: dead ranks send no reports."""
        collecting = asyncio.create_task(self._collect(expectation, phase, deadline_s), name=f"reports of {phase}")
        try:
            while not (await asyncio.wait([collecting], timeout=WATCH_S))[0]:
                await self._require_listener()
        finally:
            collecting.cancel()
        return collecting.result()

    async def _require_listener(self) -> None:
        """Raises ServerAwayError if nothing listens. A slow server is covered by the deadline of the reports."""
        try:
            await self._server.label()
        except ServerAwayError:
            raise
        except P2PCastError:
            return

    async def _collect(self, expectation: Expectation, phase: str, deadline_s: float) -> list[Report]:
        try:
            reports = await expectation.wait(deadline_s)
        except TimeoutError:
            elsewhere = f" ({self._socket.elsewhere()})" if self._socket.elsewhere else ""
            raise RetryableError(
                f"{self.name}: {expectation.missing} of {self.count} workers did not report {phase} within"
                f" {deadline_s:g} s,"
                f" ranks {', '.join(map(str, expectation.missing_ranks))}{elsewhere}; "
                "do they have this peer's socket in P2PCAST_SOCK, and is it the same host?"
            ) from None
        raise_first(self.name, reports, phase)
        return reports
