"""What the hub does, apart from encoding, when a version from folders or ranks begins, is published, or fails.

Guarantees:

- A published version is announced, and its mark is remembered.
- A step that was not published is listed with the reason, until it is published after all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from p2pcast.artifact.signed_records import ANCHOR
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from p2pcast.quantised.folder_opening import Opening
from p2pcast.relay.holding import Holding
from p2pcast.sparse.budget_schedule import check_schedule
from p2pcast.state.staging import Staging
from topology.version_sizes import VersionSizes
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.published import Published
from trainer_node.publish.version_sealer import VersionSealer
from trainer_node.publish.version_source import FolderSource

logger = logging.getLogger("p2pcast.hub")

FROM_RANKS = " from ranks"


@dataclass(eq=False, repr=False)
class VersionLifecycle:
    """Called by ``CheckpointSource`` and ``RankIntake``. ``holdings``: the node's artifacts. ``recovered``: set once
    the hub has received its peers' reports after a restart. ``until_caught_up`` returns once no peer is too far behind.
    ``retain`` applies retention. ``on_published`` is called after each version.
    """

    publishing: Pipeline
    history: PublishHistory
    staging: Staging
    sizes: VersionSizes
    events: Events
    broadcasts: BroadcastPlanner
    sealer: VersionSealer
    _: KW_ONLY
    holdings: Mapping[bytes, Holding]
    recovered: asyncio.Event
    until_caught_up: Callable[[], Awaitable[None]]
    announce: Callable[[Iterable[Holding]], None]
    retain: Callable[[], Awaitable[None]]
    on_published: Sequence[Callable[[], None]]
    published: Published | None = field(init=False, default=None)
    """The newest version that this process published."""
    skipped: dict[str, str] = field(init=False, default_factory=dict)
    """Folder (``step_N from ranks`` for ranks) → why it was not published. Only the newest entries are kept."""

    @property
    def failed(self) -> bool:
        """Whether the hub's own disk has failed, so that nothing more can be published."""
        return self.sealer.failed

    async def publish_base(self, base: Path | None, open_: Opening = Checkpoint.open) -> None:
        """Publish the state in this folder as the first version, unless the run already has a version."""
        if base is None:
            return
        if self.publishing.shadow is None:
            await self.recovered.wait()
        if self.publishing.shadow is not None:
            logger.info("--base %s is not used: the run is at version %s", base, self.publishing.head)
            return
        if (used := self.publishing.used) is not None and used.step > 0:
            logger.error(
                "--base %s is not published: the run has had versions to %s, which this hub has lost. Let the trainer"
                " publish its weights, or start a new run with a new state folder",
                base,
                used,
            )
            return
        checkpoint = await self.staging.run(open_, base)
        files = await self.staging.run(checkpoint.small_files)
        check_schedule(files)
        source = FolderSource(checkpoint, files, self.staging)
        done = await self.publishing.publish(self.publishing.version_for(0), checkpoint.layout(), source)
        self.published = done
        self.sizes.state(done.dense_bytes)
        self.sealer.sealed(done.version, done.bytes)
        logger.info("version %s is %s: %.1f MB", done.version, base, done.dense_bytes / 1e6)
        self.announce(self.holdings.values())

    # -- a version, from folders or from ranks

    async def until_may_begin(self) -> None:
        """Wait until the hub has recovered and no peer is too far behind."""
        await self.recovered.wait()
        await self.until_caught_up()

    def begin(self, version: Version) -> None:
        """Report that ``version`` begins; called before its first cells are sent."""
        head = self.publishing.head
        if head is not None and version.branch > head.branch:
            logger.info("step %d begins branch %d: the newest version was %s", version.step, version.branch, head)
            self.events.emit("branch", version=str(version), after=str(head))
        self.events.emit("opened", version=str(version))
        self.broadcasts.begin(version)

    async def finish(self, done: Published) -> None:
        """Announce the sealed version ``done``, and prepare for the next one. Raises LocalError."""
        self.published = done
        self.sizes.state(done.dense_bytes)
        # Deltas are announced when they open and seal; an anchor is in the store as a whole at once.
        if done.kind == ANCHOR:
            self.sealer.sealed(done.version, done.bytes)
        elif self.sizes.published(done.bytes):
            logger.info("plans are made for versions of about %.3g MiB now", self.sizes.bytes / limits.MIB)
        whole = (h for h in self.holdings.values() if h.open.base is None and h.open.version == done.version)
        self.announce(whole)
        _log(done)
        codec = None if done.choice is None else done.choice.codec
        self.events.emit(
            "published", version=str(done.version), codec=codec, changed=done.changed, params=done.params,
            dense_bytes=done.dense_bytes, encode_s=round(done.encode_s, 4),
        )  # fmt: skip
        for published in self.on_published:
            published()
        await self.staging.run(self.publishing.reserve)
        await self.retain()

    def skip(self, name: str, why: str) -> None:
        """Report why a folder, or a step from ranks, was not published."""
        why = why[: limits.MAX_EVENT_TEXT]
        if self.skipped.get(name) == why:
            return
        # Removed first, so that a name with a new reason is among the newest.
        self.skipped.pop(name, None)
        self.skipped[name] = why
        if len(self.skipped) > limits.MAX_SKIPPED:
            del self.skipped[next(iter(self.skipped))]
        self.events.emit("skipped", folder=name, why=why)
        logger.warning("skipped %s: %s", name, why)

    def unskip(self, name: str) -> None:
        self.skipped.pop(name, None)

    # -- a version from ranks

    async def finish_from_ranks(self, done: Published) -> None:
        """Call ``finish``, and remember the weights, because a folder may contain the same ones later."""
        try:
            await self.finish(done)
            self.skipped = {name: why for name, why in self.skipped.items() if not name.endswith(FROM_RANKS)}
            mark = self.publishing.mark_of(done.version)
            await self.staging.run(self.history.note, done.version.step, mark=mark, files="")
        except P2PCastError as error:
            logger.warning("after version %s: %s", done.version, error)

    def fail_from_ranks(self, step: int, why: str) -> None:
        self.broadcasts.end()
        self.skip(f"step_{step}{FROM_RANKS}", why)

    def ranks_overdue(self, ranks: str, why: str) -> None:
        """Report that ``ranks`` keep the other ranks of their group waiting, and that their version is given up."""
        self.events.emit("ranks_overdue", ranks=ranks, why=why)
        logger.warning("%s", why)


def _log(done: Published) -> None:
    logger.info(
        "version %s: %s of %.1f kB, %.0f times smaller than dense; %.2f %% of %d values changed; encoded in %.2f s",
        done.version, done.kind, done.bytes / 1e3, done.dense_bytes / max(1, done.bytes),
        100 * done.changed / max(1, done.params), done.params, done.encode_s,
    )  # fmt: skip
    if done.choice is not None:
        logger.info("version %s was sent in codec %s: %s", done.version, done.choice.codec, done.choice.why)
