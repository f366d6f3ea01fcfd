"""When engines switch: by themselves (``auto``), on command (``manual``), or all at once (``barrier``).

Guarantees: a version is durable before peers are instructed to switch to it. The barrier's decisions are carried out in
the order in which they were made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any

from p2pcast.daemon.command_body import check_keys
from p2pcast.daemon.http_server import Document
from p2pcast.ground.errors import P2PCastError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import StateFile
from p2pcast.process.events import Events
from p2pcast.wire import messages
from trainer_node.commit.barrier import (
    Barrier,
    CommitVersion,
    Decision,
    EngineReport,
    Event,
    Failed,
    HoldShadows,
    PeerReported,
    Sealed,
    Superseded,
    Switched,
)
from trainer_node.hub_config import BARRIER_QUORUM, BARRIER_TIMEOUT_S, HubConfig
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import Sessions

logger = logging.getLogger("p2pcast.hub")

REJOIN_S = 10.0
"""Peers of a restarted hub rejoin within 7.5 s (rollout_node.control.hub_session). The barrier waits for them for this
many seconds.
"""
OUTCOMES = ("committed", "quorum", "failed", "superseded")


class CommitTarget:
    """The version that engines were last instructed to switch to; meaningless with ``auto``."""

    def __init__(self, memory: StateFile, fleet: Sessions, in_thread: Callable[..., Awaitable[Any]]) -> None:
        """``in_thread`` runs a blocking call."""
        self._memory, self._fleet, self._in_thread = memory, fleet, in_thread

    @property
    def version(self) -> Version | None:
        remembered = self._memory["target"]
        return None if remembered is None else Version.of(remembered)

    async def switch(self, version: Version) -> None:
        """Instruct all peers to switch, once the version is recorded on disk. Raises LocalError."""
        await self._in_thread(self._memory.update, target=list(version))
        self._fleet.send_all(messages.Commit(version))


class Commits:
    def __init__(
        self,
        config: HubConfig,
        target: CommitTarget,
        fleet: Sessions,
        events: Events,
        *,
        versions: Callable[[], Collection[Version]],
        later: Callable[[Coroutine[Any, Any, None], str], None],
        fail: Callable[[P2PCastError], None],
    ) -> None:
        """``versions``: those in this hub's store. ``later`` starts a background task. ``fail`` stops the hub."""
        self.mode, self.target = config.commit, target
        self.barrier: Barrier | None = None
        self.outcomes: Counter[str] = Counter()
        self._fleet = fleet
        self._versions = versions
        self._later = later
        self._fail = fail
        self._events = events
        self._timeout_s = BARRIER_TIMEOUT_S if config.barrier_timeout_s is None else config.barrier_timeout_s
        self._quorum = BARRIER_QUORUM if config.barrier_quorum is None else config.barrier_quorum
        self._last: Document | None = None
        self._order = asyncio.Lock()

    def start(self, newest: Version | None) -> None:
        """Start the barrier; call before peers may join. ``newest``: the newest sealed version."""
        if self.mode == "barrier":
            now = time.monotonic()
            settled_at = now if newest is None else now + REJOIN_S
            self.barrier = Barrier(self._timeout_s, self._quorum, self.target.version, settled_at)
            if newest is not None:
                self.handle(Sealed(newest))

    def greeting(self) -> list[messages.Record]:
        """Messages to send to a peer after its catalog."""
        hold = None if self.barrier is None else self.barrier.hold
        return [] if hold is None else [messages.Hold(hold)]

    def reported(self, peer: PeerRecord) -> None:
        engines = {r.name: EngineReport(r.staged, r.committed, r.ready) for r in peer.engines if r.started}
        self.handle(PeerReported(peer.ident, engines))

    def handle(self, event: Event) -> None:
        """Pass an event to the barrier, and carry out its decisions."""
        if self.barrier is None:
            return
        for decision in self.barrier.handle(event, time.monotonic()):
            self._announce(decision)
            self._later(self._carry_out(decision), "barrier")

    async def command(self, body: Document) -> Document:
        """POST /commit. Raises UsageError, RefusedError, LocalError."""
        check_keys(body, "version", "timeout_s")  # the CLI sends the same command to hubs and peers
        if self.mode != "manual":
            raise UsageError("this hub commits automatically: start the hub with --commit manual for this command")
        version = Version.parse(str(body.get("version", "")))
        if version not in self._versions():
            raise RefusedError(f"version {version} is not one of this run's; see `p2pcast status`")
        await self.target.switch(version)
        return {"target": str(version)}

    def status(self) -> Document | None:
        """The barrier's state for /status, or None if there is no barrier."""
        barrier = self.barrier
        if barrier is None:
            return None
        staged, ready, needed = barrier.counts
        deadline = barrier.deadline
        return {
            "phase": barrier.phase.value,
            "version": None if barrier.version is None else str(barrier.version),
            "staged": staged,
            "ready": ready,
            "needed": needed,
            "waiting_for": self._names(barrier.late),
            "deadline_s": None if deadline is None else round(max(0.0, deadline - time.monotonic()), 3),
            "timeout_s": self._timeout_s,
            "quorum": self._quorum,
            "last": self._last,
        }

    # -- carrying it out

    async def _carry_out(self, decision: Decision) -> None:
        async with self._order:
            try:
                if isinstance(decision, HoldShadows):
                    self._fleet.send_all(messages.Hold(decision.version))
                elif isinstance(decision, CommitVersion):
                    await self.target.switch(decision.version)
            except P2PCastError as error:
                self._fail(error)

    # -- announcing it

    def _announce(self, decision: Decision) -> None:
        match decision:
            case CommitVersion(version, staged, ready, ()):
                logger.info("version %s: all %d peers have staged it and switch", version, ready)
                self._emit_outcome("committed", version, staged=staged, ready=ready)
            case CommitVersion(version, staged, ready, late):
                names = self._names(late)
                logger.warning("version %s: %d of %d peers switch; late: %s", version, staged, ready, ", ".join(names))
                self._emit_outcome("quorum", version, staged=staged, ready=ready, late=names)
            case Failed(version, staged, ready, needed, late):
                names = self._names(late)
                logger.warning(
                    "version %s: no engine switches, %d of %d peers have staged it and %d are needed; late: %s",
                    version, staged, ready, needed, ", ".join(names),
                )  # fmt: skip
                self._emit_outcome("failed", version, staged=staged, ready=ready, needed=needed, late=names)
            case Superseded(version, by):
                logger.info("version %s was never switched to: %s takes its place", version, by)
                self._emit_outcome("superseded", version, by=str(by))
            case Switched(version, missing):
                if missing:
                    logger.warning("version %s: %d engines were told to switch and have not", version, len(missing))
            case HoldShadows():
                pass

    def _emit_outcome(self, outcome: str, version: Version, **facts: Any) -> None:
        self.outcomes[outcome] += 1
        self._last = {"version": str(version), "outcome": outcome, "time": round(time.time(), 3), **facts}
        self._events.emit("barrier", outcome=outcome, version=str(version), **facts)

    def _names(self, idents: Iterable[str]) -> list[str]:
        return [self._fleet.name_of(ident) for ident in idents]
