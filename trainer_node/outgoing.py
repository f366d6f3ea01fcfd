"""Versions as the hub sends them out, from folders or from ranks: what follows when one begins, has gone out, or comes to nothing.

Promises: what has gone out is announced, and remembered by its mark; what was not published is named with its reason until the same step is published after all.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Protocol

from p2pcast import limits
from p2pcast.artifact.records import ANCHOR
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.errors import P2PCastError
from p2pcast.events import Events
from p2pcast.relay.node import Node
from p2pcast.state.staging import Staging
from p2pcast.version import Version
from trainer_node.broadcast import Broadcast
from trainer_node.fleet import Fleet
from trainer_node.intake_session import Intake
from trainer_node.keeping import Keeping
from trainer_node.membership import Membership
from trainer_node.pace import Pace
from trainer_node.past import Past
from trainer_node.publishing import Published, Publishing
from trainer_node.recall import Recall
from trainer_node.sealing import Sealing
from trainer_node.session import Session

logger = logging.getLogger("p2pcast.hub")

FROM_RANKS = " from ranks"


class OutgoingOwner(Protocol):
    publishing: Publishing
    past: Past
    staging: Staging
    node: Node
    events: Events
    fleet: Fleet
    broadcast: Broadcast
    sessions: dict[str, Session]
    membership: Membership
    sealing: Sealing
    intake: Intake
    keeping: Keeping
    pace: Pace
    recall: Recall


class Outgoing:
    """A ``FoldersOwner`` and an ``IntakeOwner``."""

    def __init__(self, owner: OutgoingOwner) -> None:
        self.published: Published | None = None
        """The newest."""
        self.skipped: dict[str, str] = {}
        """Folder name (``step_N from ranks`` for what came from ranks) → why it was not published; the newest ones."""
        self._owner = owner

    async def begin_from(self, base: Path | None) -> None:
        """Where there is no version yet, the state in this folder becomes the first."""
        owner = self._owner
        if base is None or owner.publishing.shadow is not None:
            return
        await owner.recall.done.wait()
        checkpoint = await owner.staging.run(Checkpoint.open, base)
        files = await owner.staging.run(checkpoint.small_files)
        version = owner.publishing.version_for(0)
        self.published = await owner.publishing.publish_anchor(version, checkpoint, checkpoint.layout(), files)
        owner.membership.sizes.state(self.published.dense_bytes)
        owner.sealing.sealed(self.published.version, self.published.bytes)
        logger.info("version %s is %s: %.1f MB", version, base, self.published.dense_bytes / 1e6)
        owner.sealing.announce(owner.node.holdings.values())

    def begins(self, version: Version) -> None:
        """Its cells are about to go out."""
        owner = self._owner
        head = owner.publishing.head
        if head is not None and version.branch > head.branch:
            logger.info("step %d begins branch %d: the newest version was %s", version.step, version.branch, head)
            owner.events.emit("branch", version=str(version), after=str(head))
        now = time.monotonic()
        owner.events.emit("opened", version=str(version))
        owner.fleet.began(version, now)
        owner.broadcast.begin(version, owner.sessions, now)
        owner.membership.began()

    async def went_out(self, done: Published) -> None:
        owner = self._owner
        version = done.version
        self.published = done
        owner.membership.sizes.state(done.dense_bytes)
        # Deltas are announced as they open and seal; an anchor lies whole in the store at once.
        if done.kind == ANCHOR:
            owner.sealing.sealed(version, done.bytes)
        owner.sealing.announce(h for h in owner.node.holdings.values() if h.open.base is None and h.open.version == version)
        logger.info(
            "version %s: %s of %.1f kB, %.0f times smaller than dense; %.2f %% of %d values changed; encoded in %.2f s",
            version, done.kind, done.bytes / 1e3, done.dense_bytes / max(1, done.bytes), 100 * done.changed / max(1, done.params),
            done.params, done.encode_s,
        )  # fmt: skip
        if done.choice is not None:
            logger.info("version %s went out in codec %s: %s", version, done.choice.codec, done.choice.why)
        owner.intake.changed()
        owner.keeping.news()
        await owner.staging.run(owner.publishing.reserve)
        await owner.sealing.retain()

    # -- FoldersOwner

    async def until_near(self) -> None:
        await self._owner.recall.done.wait()
        await self._owner.pace.until_near()

    def skip(self, name: str, why: str) -> None:
        why = why[: limits.MAX_EVENT_TEXT]
        if self.skipped.get(name) == why:
            return
        # Named again for another reason, it is among the newest.
        self.skipped.pop(name, None)
        self.skipped[name] = why
        if len(self.skipped) > limits.MAX_SKIPPED:
            del self.skipped[next(iter(self.skipped))]
        self._owner.events.emit("skipped", folder=name, why=why)
        logger.warning("skipped %s: %s", name, why)

    def not_skipped(self, name: str) -> None:
        self.skipped.pop(name, None)

    def broken(self) -> bool:
        return self._owner.node.error.done()

    # -- IntakeOwner

    async def is_out(self, done: Published) -> None:
        """As from a folder: the same weights may come in one, too, and are nothing new then."""
        owner = self._owner
        try:
            await self.went_out(done)
            self.skipped = {name: why for name, why in self.skipped.items() if not name.endswith(FROM_RANKS)}
            mark = owner.publishing.mark_of(done.version)
            await owner.staging.run(owner.past.note, done.version.step, mark=mark)
        except P2PCastError as error:
            logger.warning("after version %s: %s", done.version, error)

    def overdue(self, ranks: str, why: str) -> None:
        self._owner.events.emit("ranks_overdue", ranks=ranks, why=why)
        logger.warning("%s", why)

    def came_to_nothing(self, step: int, why: str) -> None:
        self._owner.broadcast.end()
        self.skip(f"step_{step}{FROM_RANKS}", why)

    def engines(self) -> list[list[Any]]:
        rows = ((f"{p.name}/{e.name}", e) for p in self._owner.membership.peers.values() for e in p.engines)
        return [
            [name[: limits.MAX_ENGINE_NAME], None if e.committed is None else list(e.committed), e.ready] for name, e in rows
        ][: limits.MAX_ENGINES]
