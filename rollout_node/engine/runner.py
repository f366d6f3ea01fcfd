"""Drives one installer: starts and checks it, stages each version while the shadow is held still, commits when allowed,
and retries after failures.

Guarantees:

- Versions are installed in ascending order, and superseded ones are skipped.
- A failing installer stops neither the other engines nor the relay.

A target that sends signs of life is watched throughout: a frozen engine is unready within seconds; a busy one stays
ready. An engine that lost its recorded version is unready within seconds, and gets the shadow's version without waiting
for the next one. A whole state is audited once before the engine counts as ready, at the cost of one pass over the
model; installers check deltas themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from p2pcast.ground.errors import IntegrityError, P2PCastError, RefusedError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.process.repeated_messages import TROUBLE_ENDED
from p2pcast.wire import messages
from rollout_node.engine.callbacks import Callbacks
from rollout_node.engine.commit_permission import CommitPermission
from rollout_node.engine.switch_slots import SwitchSlots
from rollout_node.installers.installer import (
    Audit,
    CommitReport,
    Installer,
    Pulse,
)
from rollout_node.shadow.shadow_state import HeldShadow
from rollout_node.shadow.version_digests import VersionDigests

logger = logging.getLogger("p2pcast.peer")

RETRY_S = 2.0
"""Seconds before a failed start, stage or commit is retried."""

CHECK_S = 1.0
"""Seconds between two checks of an idle engine."""

CHECK_DEADLINE_S = 10.0
"""Seconds for an engine to report which version it holds; a slower engine counts as unreachable."""

STEP_S = 120.0
"""The same for an engine whose processes send signs of life, because a long prefill delays the answer."""

UNHEARD_S = 10.0
"""Seconds after which signs of life expire: this process was stopped, and the engine may have been replaced."""

STAGE_S = 1800.0
"""Longest time in seconds for which one installer may hold the shadow still: 140 GB at 80 MB/s. It keeps an installer
that hangs from stopping the others for ever. An audit has the same limit.
"""

KEPT = 256
"""Number of commits to remember."""

_TURN, _COMMIT, _CALLBACK = "turn", "commit", "before_commit"
_SHOWN = 3


class Runner:
    """One engine. ``slots`` and ``callbacks`` are shared by all engines of the peer. ``on_changed`` is called when the
    engine's state may have changed. ``on_wrong_weights`` is called when an audit finds weights that differ from the
    version that the shadow supplied: the shadow may be corrupt.
    """

    def __init__(
        self,
        installer: Installer,
        shadow: HeldShadow,
        policy: CommitPermission,
        on_changed: Callable[[], None],
        on_wrong_weights: Callable[[], None],
        slots: SwitchSlots | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.installer = installer
        self.started = False
        self.staged: Version | None = None
        """The version staged last, whether in use or not."""
        self.fault: Exception | None = None
        """The error of the last step; None if it succeeded."""
        self.steps = 0
        self.waits_for: str | None = None
        """What the switch waits for: ``turn`` (--rolling), ``commit`` (by the external driver) or ``before_commit``
        (the user's callback deferred it).
        """
        self.report: CommitReport | None = None
        self.versions: list[Version] = []
        """The newest versions that this process has committed, in order."""
        self.commits = 0
        """Number of commits made by this process."""
        self._shadow = shadow
        self._policy = policy
        self._on_changed = on_changed
        self._on_wrong_weights = on_wrong_weights
        self._slots = slots or SwitchSlots()
        self._callbacks = callbacks or Callbacks()
        self._busy = asyncio.Lock()
        """Held during each call to the installer."""
        self._wake = asyncio.Event()
        self._tried: Version | None = None
        self._prepared: tuple[Version, VersionDigests] | None = None
        """The version that is staged but not committed, with its digests."""
        self._digests: VersionDigests | None = None
        """The digests of the version in use."""
        self._trusted = False
        """Whether the state in use was audited, or built by deltas on an audited state."""
        self._reached = False
        """Whether the engine answered the last check."""
        self._was_ready: bool | None = None
        """Whether the engine was ready when it took its slot; None if it has no slot."""
        self._pulse = installer.abilities.pulse
        self._frozen: str | None = None
        """The fault that the newest check of the signs of life found, or None."""
        self._heard_s = time.monotonic()
        """Time of that check."""
        self._deferred: tuple[Version | None, float, float] = (None, 0.0, 0.0)
        """A version, the seconds by which it has been deferred, and until when, by the loop's clock."""

    def wake(self) -> None:
        """Called when a version was staged, a version may be committed now, or a slot is free."""
        self._wake.set()

    def distrust(self) -> None:
        """Make the engine unready, because its state is not the run's version of that number, until an audit succeeds
        or the whole state has been written.
        """
        self._trusted = False
        self._digests = self._prepared = self.staged = None
        self.wake()

    @property
    def ready(self) -> bool:
        """Whether the engine is ready for requests."""
        heard = self._pulse is None or time.monotonic() - self._heard_s < UNHEARD_S
        return self.installer.ready and self._trusted and self._reached and heard and self._frozen is None

    @property
    def committed(self) -> Version | None:
        """The version in use; None unless it is known to be correct."""
        return self.installer.committed if self._trusted else None

    @property
    def serving_epoch(self) -> str | None:
        """The id from ``Abilities``; None unless the engine serves a version known to be correct."""
        return self.installer.abilities.serving_epoch() if self.ready and self.committed is not None else None

    @property
    def error(self) -> str | None:
        fault = self.fault
        if fault is None or isinstance(fault, P2PCastError):
            return None if fault is None else str(fault)
        return f"{type(fault).__name__}: {fault}"

    def holds(self, version: Version) -> bool:
        return self.ready and self.installer.committed == version

    def settled(self, version: Version) -> bool:
        """Whether this installer no longer needs the shadow to stay at ``version``."""
        return not self.started or (self._tried is not None and self._tried >= version)

    async def run(self) -> None:
        """Drive the installer until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._drive(), name=f"installs of {self.installer.name}")
            if self._pulse is not None:
                group.create_task(self._watch(self._pulse), name=f"signs of life of {self.installer.name}")

    async def _watch(self, pulse: Pulse) -> None:
        while True:
            frozen = await pulse.fault() if self.started else None
            self._heard_s = time.monotonic()
            if frozen != self._frozen:
                logger.warning("%s", frozen or f"{self.installer.name} gives signs of life again")
                self._frozen = frozen
                self._on_changed()
            await asyncio.sleep(CHECK_S)

    async def _drive(self) -> None:
        woken = True
        try:
            while True:
                self._wake.clear()
                before = self.status()
                async with self._busy:
                    wait_s = await self._guarded(idle=not woken)
                self.steps += 1
                if woken or self.status() != before:
                    self._on_changed()
                woken = True
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                except TimeoutError:
                    woken = False
        finally:
            self._slots.leave(self)
            await self.installer.close()

    async def audit(self) -> tuple[Audit, int]:
        """Compare the engine's own weights with the version in use. Returns the comparison and the version's digest.
        Wrong weights are replaced afterwards.

        Raises RefusedError if no version is in use or its digests are unknown, and whatever the installer raises.
        """
        async with self._busy:
            if self.installer.committed is None or self._digests is None:
                raise RefusedError(
                    f"{self.installer.name}: no version is in use there, so there is nothing to compare with"
                )
            digests = self._digests
            try:
                return await self._audit(digests), digests.state
            finally:
                self._prepared, self.staged = None, self.installer.committed
                self.wake()

    async def _guarded(self, idle: bool) -> float:
        """Run one step, and return the seconds to wait for the next one unless woken. Errors are logged and kept."""
        try:
            wait_s = await self._step(idle)
            if self.fault is not None:
                logger.info("%s: installs go on", self.installer.name, extra=TROUBLE_ENDED)
            self.fault = None
        except P2PCastError as error:
            wait_s = RETRY_S
            logger.warning("%s: %s", self.installer.name, error)
            self.fault = error
        except Exception as error:  # a bug in an installer must not stop the relay
            wait_s = RETRY_S
            logger.exception("%s failed", self.installer.name)
            self.fault = error
        self._leave_slot()
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
            shadow = await still.enter_async_context(self._shadow.held_still())
            if shadow is None:
                return CHECK_S
            version, path = shadow
            if self.holds(version):
                self._prepared = None
                return CHECK_S
            if (self._prepared is None or self._prepared[0] != version) and not await self._stage(version, path):
                return CHECK_S
            if not self._policy.may_commit(version):
                self.waits_for = _COMMIT
                return CHECK_S
            if not self._take_slot():
                return CHECK_S
            if not installer.commit_needs_shadow:
                await still.aclose()
            if (defer_s := await self._defer(version)) > 0:
                self.waits_for = _CALLBACK
                return defer_s
            await self._switch()
        return CHECK_S

    async def _check(self) -> None:
        """Check that the engine still answers and holds its recorded version."""
        installer, recorded = self.installer, self.installer.committed
        if recorded is None:
            return
        deadline_s = STEP_S if self._pulse is not None and self._pulse.beats else CHECK_DEADLINE_S
        try:
            async with asyncio.timeout(deadline_s):
                await installer.check()
        except BaseException as error:
            # An engine stays ready while the check runs.
            self._reached = False
            if isinstance(error, TimeoutError):
                raise RetryableError(
                    f"{installer.name} did not say within {deadline_s:g} s which version it holds"
                ) from None
            raise
        self._reached = True
        if installer.committed != recorded:
            logger.warning("%s no longer holds version %s: the weights are installed anew", installer.name, recorded)
            self.distrust()
            self._on_changed()

    async def _stage(self, version: Version, path: Path) -> bool:
        """Stage the version. False if a slot is needed first: staging a whole state takes the engine offline."""
        self._tried = version
        dense = self._slots.limited and self._shadow.is_dense(self.installer.committed, version)
        if dense and not self._take_slot():
            return False
        self._prepared = self.staged = None
        digests, recorded = self._shadow.digests(), self.installer.committed
        try:
            async with asyncio.timeout(STAGE_S):
                await self.installer.stage(version, path)
        except TimeoutError:
            raise RetryableError(f"staging version {version} took longer than {STAGE_S:.0f} s") from None
        finally:
            # A whole install may switch the engine while staging. The weights are then audited after the commit.
            if self.installer.committed not in (recorded, None):
                self._trusted, self._digests = False, None
        self._prepared, self.staged = (version, digests), version
        return True

    async def _defer(self, version: Version) -> float:
        """Seconds by which to defer the switch: what the user's callback asks for, up to ``max_defer_s`` in total."""
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
        """Commit the staged version, and audit the engine after a whole state."""
        assert self._prepared is not None
        installer, (version, digests) = self.installer, self._prepared
        self._prepared = None
        try:
            self.report = await installer.commit(version)
            self._reached, self._digests = True, digests
            if self.report.dense or not self._trusted:
                self._trusted = False
                if wrong := (await self._audit(digests)).wrong:
                    raise IntegrityError(
                        f"version {version} is not in use: {named(wrong)} of the engine's own weights differ"
                    )
        except Exception as error:
            await self._callbacks.after(str(version), str(error) or type(error).__name__)
            raise
        self.versions = [*self.versions, version][-KEPT:]
        self.commits += 1
        logger.info("%s: version %s committed, pause %.1f ms", installer.name, version, 1e3 * self.report.pause_s)
        await self._callbacks.after(str(version), None)

    async def _audit(self, digests: VersionDigests) -> Audit:
        try:
            async with asyncio.timeout(STAGE_S):
                audit = await self.installer.audit(digests.layout, digests.tensors())
        except TimeoutError:
            raise RetryableError(f"{self.installer.name}: the audit took longer than {STAGE_S:.0f} s") from None
        self._trusted = not audit.wrong
        if audit.wrong:
            self._on_wrong_weights()
        return audit

    # -- slots

    def _take_slot(self) -> bool:
        if not self._slots.take(self):
            self.waits_for = _TURN
            return False
        if self._was_ready is None:
            self._was_ready = self.ready
        return True

    def _leave_slot(self) -> None:
        """Free the slot, unless this switch made the engine unready. An unreachable engine frees its slot too."""
        if self._was_ready is not None and (
            self.ready or not self._was_ready or isinstance(self.fault, RetryableError)
        ):
            self._was_ready = None
            self._slots.leave(self)

    def status(self) -> messages.EngineStatus:
        """Return the engine's row for /status and reports."""
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
            "error": self.error or self._frozen,
        }


def named(tensors: list[str]) -> str:
    """Name a few of the tensors, and count the rest, for a message."""
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    return ", ".join(tensors[:_SHOWN]) + more
