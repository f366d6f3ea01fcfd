"""Drives one installer: starts it, stages each version while the shadow is held still, commits when that is allowed, tries again when it failed.

Promises: versions go in ascending order, and one that a newer has superseded is not gone back to; an installer that fails never stops the others or the relay.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from p2pcast.errors import P2PCastError, RetryableError
from p2pcast.version import Version
from rollout_node.installers.base import CommitReport, Installer

logger = logging.getLogger("p2pcast.peer")

RETRY_S = 2.0
"""Before a failed start, stage or commit is tried again."""

STAGE_S = 1800.0
"""The shadow is held still for one installer for so long at most: time for 140 GB at 80 MB/s. One that hangs must not stop the others for ever."""


class RunnerOwner(Protocol):
    def held_still(self) -> AbstractAsyncContextManager[tuple[Version, Path] | None]:
        """Keeps the shadow at its version; None where there is none yet."""

    def may_commit(self, version: Version) -> bool: ...
    def on_installed(self) -> None: ...


class Runner:
    def __init__(self, owner: RunnerOwner, installer: Installer) -> None:
        self.installer = installer
        self.started = False
        self.staged: Version | None = None
        self.error: str | None = None
        self.report: CommitReport | None = None
        self.versions: list[Version] = []
        """Committed by this process, in order."""
        self._owner = owner
        self._wake = asyncio.Event()
        self._tried: Version | None = None

    def wake(self) -> None:
        """A version was staged in the shadow, or may be committed now."""
        self._wake.set()

    def settled(self, version: Version) -> bool:
        """Whether the shadow may move on from ``version`` as far as this installer goes."""
        return not self.started or (self._tried is not None and self._tried >= version)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    done = await self._advance()
                    self.error = None
                except P2PCastError as error:
                    done = False
                    if not isinstance(error, RetryableError) or str(error) != self.error:
                        logger.warning("%s: %s", self.installer.name, error)
                    self.error = str(error)
                except Exception as error:  # an installer's own fault must not end the relay
                    done = False
                    logger.exception("%s failed", self.installer.name)
                    self.error = f"{type(error).__name__}: {error}"
                self._owner.on_installed()
                try:
                    async with asyncio.timeout(None if done else RETRY_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            await self.installer.close()

    async def _advance(self) -> bool:
        """One step. True when there is nothing to do before the next wake."""
        installer = self.installer
        if not self.started:
            await installer.start()
            self.started = True
        async with self._owner.held_still() as shadow:
            if shadow is None:
                return True
            version, path = shadow
            if self.staged != version and not (installer.committed == version and installer.ready):
                try:
                    async with asyncio.timeout(STAGE_S):
                        await installer.stage(version, path)
                    self.staged = version
                except TimeoutError:
                    self.staged = None
                    raise RetryableError(f"staging version {version} took longer than {STAGE_S:.0f} s") from None
                except BaseException:
                    self.staged = None
                    raise
                finally:
                    self._tried = version
        ready = self.staged
        if ready is None or (installer.committed == ready and installer.ready) or not self._owner.may_commit(ready):
            return True
        try:
            self.report = await installer.commit(ready)
        except BaseException:
            self.staged = None
            raise
        self.versions.append(ready)
        logger.info("%s: version %s committed, pause %.1f ms", installer.name, ready, 1e3 * self.report.pause_s)
        return True

    def status(self) -> dict[str, Any]:
        """For /status."""
        installer, report = self.installer, self.report
        return {
            "name": installer.name,
            "ready": installer.ready,
            "staged": None if self.staged is None else str(self.staged),
            "committed": None if installer.committed is None else str(installer.committed),
            "pause_s": None if report is None else round(report.pause_s, 6),
            "recomputed_tokens": None if report is None else report.recomputed_tokens,
            "error": self.error,
        }
