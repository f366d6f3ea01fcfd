"""When engines switch, at the hub: by themselves (``auto``), on command (``manual``), or all at once (``barrier``).

Promises: what peers are told to switch to is durable first; what the barrier decides is carried out in the order in which it was decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from p2pcast.daemon import Memory
from p2pcast.errors import P2PCastError, RefusedError, UsageError
from p2pcast.events import Events
from p2pcast.http import Document
from p2pcast.relay.node import Node
from p2pcast.state.staging import Staging
from p2pcast.store.store import Store
from p2pcast.version import Version
from p2pcast.wire.messages import Body, Type
from trainer_node.barrier import Barrier, Commit, Decision, Engine, Event, Failed, Hold, Reported, Sealed, Superseded, Switched
from trainer_node.peer import Peer

logger = logging.getLogger("p2pcast.hub")

REJOIN_S = 10.0
"""Peers of a hub that was restarted come back within 7.5 s of it (rollout_node.control); until then the barrier waits for them."""
OUTCOMES = ("committed", "quorum", "failed", "superseded")


class CommitsOwner(Protocol):
    """A hub. Its node's ``error`` ends it."""

    node: Node
    staging: Staging
    store: Store

    def name_of(self, ident: str) -> str: ...

    def send_all(self, kind: Type, body: Body) -> None:
        """To every joined peer."""

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None: ...


class Commits:
    """``mode``: auto, manual or barrier. ``timeout_s`` and ``quorum``: the barrier's."""

    def __init__(self, owner: CommitsOwner, memory: Memory, events: Events, mode: str, timeout_s: float, quorum: float) -> None:
        self.mode = mode
        self.barrier: Barrier | None = None
        self.outcomes: Counter[str] = Counter()
        self._owner = owner
        self._memory = memory
        self._events = events
        self._timeout_s = timeout_s
        self._quorum = quorum
        self._last: Document | None = None
        self._order = asyncio.Lock()

    @property
    def target(self) -> Version | None:
        """What engines were last told to switch to; with ``auto`` it means nothing."""
        remembered = self._memory["target"]
        return None if remembered is None else Version.of(remembered)

    def start(self, newest: Version | None) -> None:
        """``newest``: what is sealed already. Then peers may join."""
        if self.mode == "barrier":
            now = time.monotonic()
            settled_at = now if newest is None else now + REJOIN_S
            self.barrier = Barrier(self._timeout_s, self._quorum, self.target, settled_at)
            if newest is not None:
                self.happened(Sealed(newest))

    def greeting(self) -> list[tuple[Type, Body]]:
        """What a peer is told once it knows what there is."""
        hold = None if self.barrier is None else self.barrier.hold
        return [] if hold is None else [(Type.HOLD, {"version": list(hold)})]

    def reported(self, peer: Peer) -> None:
        engines = {r.name: Engine(r.staged, r.committed, r.ready) for r in peer.engines if r.started}
        self.happened(Reported(peer.ident, engines))

    def happened(self, event: Event) -> None:
        """Whatever the barrier should know."""
        if self.barrier is None:
            return
        for decision in self.barrier.handle(event, time.monotonic()):
            self._told(decision)
            self._owner.later(self._carry_out(decision), "barrier")

    async def command(self, body: Document) -> Document:
        """POST /commit. Raises UsageError, RefusedError, LocalError."""
        if self.mode != "manual":
            raise UsageError("this hub commits by itself: start it with --commit manual to decide")
        version = Version.parse(str(body.get("version", "")))
        if version not in {s.version for s in self._owner.store.artifacts.values()}:
            raise RefusedError(f"version {version} is not one of this run's; see `p2pcast status`")
        await self._commit(version)
        return {"target": str(version)}

    def status(self) -> Document | None:
        """The barrier, for /status."""
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
                if isinstance(decision, Hold):
                    self._owner.send_all(Type.HOLD, {"version": list(decision.version)})
                elif isinstance(decision, Commit):
                    await self._commit(decision.version)
            except P2PCastError as error:
                if not self._owner.node.error.done():
                    self._owner.node.error.set_exception(error)

    async def _commit(self, version: Version) -> None:
        await self._owner.staging.run(self._memory.update, target=list(version))
        self._owner.send_all(Type.COMMIT, {"version": list(version)})

    # -- saying it

    def _told(self, decision: Decision) -> None:
        match decision:
            case Commit(version, staged, ready, ()):
                logger.info("version %s: all %d peers have staged it and switch", version, ready)
                self._say("committed", version, staged=staged, ready=ready)
            case Commit(version, staged, ready, late):
                names = self._names(late)
                logger.warning("version %s: %d of %d peers switch; late: %s", version, staged, ready, ", ".join(names))
                self._say("quorum", version, staged=staged, ready=ready, late=names)
            case Failed(version, staged, ready, needed, late):
                names = self._names(late)
                logger.warning(
                    "version %s: nobody switches, %d of %d peers have staged it and %d are needed; late: %s",
                    version, staged, ready, needed, ", ".join(names),
                )  # fmt: skip
                self._say("failed", version, staged=staged, ready=ready, needed=needed, late=names)
            case Superseded(version, by):
                logger.info("version %s was never switched to: %s takes its place", version, by)
                self._say("superseded", version, by=str(by))
            case Switched(version, missing):
                if missing:
                    logger.warning("version %s: %d engines were told to switch and have not", version, len(missing))
            case Hold():
                pass

    def _say(self, outcome: str, version: Version, **facts: Any) -> None:
        self.outcomes[outcome] += 1
        self._last = {"version": str(version), "outcome": outcome, "time": round(time.time(), 3), **facts}
        self._events.emit("barrier", outcome=outcome, version=str(version), **facts)

    def _names(self, idents: Iterable[str]) -> list[str]:
        return [self._owner.name_of(ident) for ident in idents]
