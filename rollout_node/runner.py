"""Drives one installer: starts it, looks after it, stages each version while the shadow is held still, commits when that is allowed, tries again when it failed.

Promises: versions go in ascending order, and one that a newer has superseded is not gone back to; an installer that fails never stops the others or the relay.
An engine that isn't at the version recorded for it is unready within seconds and is brought to the shadow's version without waiting for the next one. Whole
states are audited before the engine counts as ready, once: that costs a pass over the model; what a delta changed the installer has checked itself.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from p2pcast.errors import IntegrityError, P2PCastError, RefusedError, RetryableError
from p2pcast.version import Version
from rollout_node.callbacks import Callbacks
from rollout_node.installers.base import Audit, CommitReport, Installer
from rollout_node.marks import Marks
from rollout_node.turns import Turns

logger = logging.getLogger("p2pcast.peer")

RETRY_S = 2.0
"""Before a failed start, stage or commit is tried again."""

CHECK_S = 1.0
"""Between two looks at an engine that has nothing to do."""

CHECK_DEADLINE_S = 10.0
"""An engine that does not say in time what it holds is out of reach."""

STAGE_S = 1800.0
"""The shadow is held still for one installer for so long at most: time for 140 GB at 80 MB/s. One that hangs must not stop the others for ever.
An audit may take as long."""

KEPT = 256
"""Commits that are remembered."""

_TURN, _COMMIT, _CALLBACK = "turn", "commit", "before_commit"
_SHOWN = 3


class RunnerOwner(Protocol):
    def held_still(self) -> AbstractAsyncContextManager[tuple[Version, Path] | None]:
        """Keeps the shadow at its version; None where there is none yet."""

    def marks(self) -> Marks:
        """Of the version that is held still."""

    def is_dense(self, base: Version | None, to: Version) -> bool:
        """Whether an engine at ``base`` takes the whole state to get to ``to``, which is held still."""

    def may_commit(self, version: Version) -> bool: ...

    def on_installed(self) -> None:
        """Something about an engine may have changed."""

    def doubt(self) -> None:
        """An engine's own weights are not those of the version that it was given: what it was given them from may have rotted."""


class Runner:
    """One engine. ``turns`` and ``callbacks`` are the peer's, for all its engines."""

    def __init__(
        self, owner: RunnerOwner, installer: Installer, turns: Turns | None = None, callbacks: Callbacks | None = None
    ) -> None:
        self.installer = installer
        self.started = False
        self.staged: Version | None = None
        """Staged last; in use or not."""
        self.fault: Exception | None = None
        """What the last step failed with."""
        self.steps = 0
        self.waits_for: str | None = None
        """``turn`` (--rolling), ``commit`` (by whoever drives it) or ``before_commit`` (deferred by the user's callback)."""
        self.report: CommitReport | None = None
        self.versions: list[Version] = []
        """Committed by this process, in order: the newest."""
        self.commits = 0
        """By this process."""
        self._owner = owner
        self._turns = turns or Turns()
        self._callbacks = callbacks or Callbacks()
        self._busy = asyncio.Lock()
        """One call to the installer at a time."""
        self._wake = asyncio.Event()
        self._tried: Version | None = None
        self._prepared: tuple[Version, Marks] | None = None
        """Staged and not committed."""
        self._marks: Marks | None = None
        """Of the version in use."""
        self._trusted = False
        """The version in use came by deltas from a state that has been audited."""
        self._reached = False
        """It answered when it was last looked at."""
        self._was_ready: bool | None = None
        """When it took its turn; None while it is not its turn."""
        self._deferred: tuple[Version | None, float, float] = (None, 0.0, 0.0)
        """A version, by how many seconds it was deferred, until when by the loop's clock."""

    def wake(self) -> None:
        """A version was staged in the shadow, or may be committed now, or it is this one's turn."""
        self._wake.set()

    def distrust(self) -> None:
        """What the engine holds is not what the run knows by that version's number: it is unready until it has been audited, or written as a whole."""
        self._trusted = False
        self._marks = self._prepared = self.staged = None
        self.wake()

    @property
    def ready(self) -> bool:
        """Fit for traffic."""
        return self.installer.ready and self._trusted and self._reached

    @property
    def committed(self) -> Version | None:
        """The version in use, as far as it is known to be right."""
        return self.installer.committed if self._trusted else None

    @property
    def error(self) -> str | None:
        fault = self.fault
        if fault is None or isinstance(fault, P2PCastError):
            return None if fault is None else str(fault)
        return f"{type(fault).__name__}: {fault}"

    def holds(self, version: Version) -> bool:
        return self.ready and self.installer.committed == version

    def settled(self, version: Version) -> bool:
        """Whether the shadow may move on from ``version`` as far as this installer goes."""
        return not self.started or (self._tried is not None and self._tried >= version)

    async def run(self) -> None:
        """Until cancelled."""
        woken = True
        try:
            while True:
                self._wake.clear()
                before = self.status()
                async with self._busy:
                    wait_s = await self._guarded(idle=not woken)
                self.steps += 1
                if woken or self.status() != before:
                    self._owner.on_installed()
                woken = True
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    woken = False
        finally:
            self._turns.leave(self)
            await self.installer.close()

    async def audit(self) -> tuple[Audit, int]:
        """Compare the engine's own weights with the version in use, and that version's digest; what differs is mended afterwards.

        Raises RefusedError when no version is in use, or its digests aren't known; else as the installer does.
        """
        async with self._busy:
            if self.installer.committed is None or self._marks is None:
                raise RefusedError(f"{self.installer.name}: no version is in use there, so there is nothing to compare with")
            marks = self._marks
            try:
                return await self._audit(marks), marks.state
            finally:
                self._prepared, self.staged = None, self.installer.committed
                self.wake()

    async def _guarded(self, idle: bool) -> float:
        """One step; seconds to wait for the next, unless woken."""
        try:
            wait_s = await self._step(idle)
            self.fault = None
        except P2PCastError as error:
            wait_s = RETRY_S
            if not isinstance(error, RetryableError) or str(error) != self.error:
                logger.warning("%s: %s", self.installer.name, error)
            self.fault = error
        except Exception as error:  # an installer's own fault must not end the relay
            wait_s = RETRY_S
            logger.exception("%s failed", self.installer.name)
            self.fault = error
        self._leave_turn()
        return wait_s

    async def _step(self, idle: bool) -> float:
        installer = self.installer
        self.waits_for = None
        if not self.started:
            await installer.start()
            self.started = self._reached = True
        elif idle:
            await self._check()
        async with AsyncExitStack() as still:
            shadow = await still.enter_async_context(self._owner.held_still())
            if shadow is None:
                return CHECK_S
            version, path = shadow
            if self.holds(version):
                self._prepared = None
                return CHECK_S
            if (self._prepared is None or self._prepared[0] != version) and not await self._stage(version, path):
                return CHECK_S
            if not self._owner.may_commit(version):
                self.waits_for = _COMMIT
                return CHECK_S
            if not self._take_turn():
                return CHECK_S
            if not installer.commit_needs_shadow:
                await still.aclose()
            if (defer_s := await self._defer(version)) > 0:
                self.waits_for = _CALLBACK
                return defer_s
            await self._switch()
        return CHECK_S

    async def _check(self) -> None:
        """Is it still there, and at the version recorded?"""
        installer, recorded = self.installer, self.installer.committed
        if recorded is None:
            return
        try:
            async with asyncio.timeout(CHECK_DEADLINE_S):
                await installer.check()
        except BaseException as error:
            # Not before: an engine that is merely being asked is no less ready.
            self._reached = False
            if isinstance(error, TimeoutError):
                raise RetryableError(f"{installer.name} did not say within {CHECK_DEADLINE_S:g} s what it holds") from None
            raise
        self._reached = True
        if installer.committed != recorded:
            logger.warning("%s no longer holds version %s: it gets its weights anew", installer.name, recorded)
            self.distrust()
            self._owner.on_installed()

    async def _stage(self, version: Version, path: Path) -> bool:
        """False when this has to wait for its turn: bringing in a whole state takes an engine out of use."""
        self._tried = version
        dense = self._turns.limited and self._owner.is_dense(self.installer.committed, version)
        if dense and not self._take_turn():
            return False
        self._prepared = self.staged = None
        marks = self._owner.marks()
        try:
            async with asyncio.timeout(STAGE_S):
                await self.installer.stage(version, path)
        except TimeoutError:
            raise RetryableError(f"staging version {version} took longer than {STAGE_S:.0f} s") from None
        self._prepared, self.staged = (version, marks), version
        return True

    async def _defer(self, version: Version) -> float:
        """Seconds for which the user's callback wants the switch deferred from now on, as far as that is granted."""
        loop = asyncio.get_running_loop()
        deferred, spent_s, until = self._deferred
        if deferred != version:
            spent_s = until = 0.0
        if (left_s := until - loop.time()) > 0:
            return left_s
        wanted_s = min(await self._callbacks.before(str(version)), self._callbacks.max_defer_s - spent_s)
        self._deferred = (version, spent_s + max(0.0, wanted_s), loop.time() + wanted_s)
        return wanted_s

    async def _switch(self) -> None:
        """Commit what is prepared; audit it if it is a whole state."""
        assert self._prepared is not None
        installer, (version, marks) = self.installer, self._prepared
        self._prepared = None
        try:
            self.report = await installer.commit(version)
            self._reached, self._marks = True, marks
            if self.report.dense or not self._trusted:
                self._trusted = False
                if wrong := (await self._audit(marks)).wrong:
                    raise IntegrityError(f"version {version} is not in use: {named(wrong)} of the engine's own weights differ")
        except Exception as error:
            await self._callbacks.after(str(version), str(error) or type(error).__name__)
            raise
        self.versions = [*self.versions, version][-KEPT:]
        self.commits += 1
        logger.info("%s: version %s committed, pause %.1f ms", installer.name, version, 1e3 * self.report.pause_s)
        await self._callbacks.after(str(version), None)

    async def _audit(self, marks: Marks) -> Audit:
        try:
            async with asyncio.timeout(STAGE_S):
                audit = await self.installer.audit(marks.layout, marks.tensors())
        except TimeoutError:
            raise RetryableError(f"{self.installer.name}: the audit took longer than {STAGE_S:.0f} s") from None
        self._trusted = not audit.wrong
        if audit.wrong:
            self._owner.doubt()
        return audit

    # -- turns

    def _take_turn(self) -> bool:
        if not self._turns.take(self):
            self.waits_for = _TURN
            return False
        if self._was_ready is None:
            self._was_ready = self.ready
        return True

    def _leave_turn(self) -> None:
        """Whoever was ready and is not any more keeps its turn, unless it is out of reach: that is not of our doing."""
        if self._was_ready is not None and (self.ready or not self._was_ready or isinstance(self.fault, RetryableError)):
            self._was_ready = None
            self._turns.leave(self)

    def status(self) -> dict[str, Any]:
        """For /status."""
        installer, report, committed = self.installer, self.report, self.committed
        return {
            "name": installer.name,
            "ready": self.ready,
            "staged": None if self.staged is None else str(self.staged),
            "committed": None if committed is None else str(committed),
            "pause_s": None if report is None else round(report.pause_s, 6),
            "recomputed_tokens": None if report is None else report.recomputed_tokens,
            "detail": {} if report is None else dict(report.detail),
            "waits_for": self.waits_for,
            "error": self.error,
        }


def named(tensors: list[str]) -> str:
    """For messages."""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return ", ".join(tensors[:_SHOWN]) + more
