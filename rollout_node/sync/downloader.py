"""Pulls artifacts that no parent pushes, piece by piece and from several nodes at once.

Guarantees:

- An artifact is either pulled or pushed, never both.
- If a source dies, refuses, is slow or sends garbage, only its own share is delayed, because other sources are asked
  for its pieces at once.
- While a version is being pushed here, sources are asked to send slowly.

``p2pcast.relay.pull_schedule`` decides which source is asked for which pieces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from p2pcast.ground import limits
from p2pcast.ground.addresses import show_address
from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.ground.observers import Observers
from p2pcast.ground.private_random import fraction
from p2pcast.ground.wakeup import Wakeup
from p2pcast.relay.artifact_excerpt import Excerpt
from p2pcast.relay.holding import ArtifactHolder
from p2pcast.relay.pull_schedule import CancelPieces, LeaveParent, PullSchedule, RequestPieces
from p2pcast.relay.pull_source import Puller, PullSource
from p2pcast.relay.pull_throttle import Throughput, pull_bytes_s
from p2pcast.relay.upstream import ReceivingNode
from rollout_node.sync.connector import Connector, Place

logger = logging.getLogger("p2pcast.peer")

SOURCES = 6
"""Number of concurrent links: enough to outweigh one or two slow ones, and few for the sources' own children."""
ENOUGH = 2
"""If there are fewer sources than this, the hub becomes a source too."""
STRIPES = 3
"""Stripes of a pull link: one for messages, the others for pieces, whose rate is sometimes limited."""
SEEK_S = 3.0
"""Seconds between two requests to the hub for sources."""
ANSWER_S = 1.0
"""Seconds to wait for the hub's first answer before the hub itself becomes a source."""
TICK_S = 0.05
"""Seconds between two rounds of decisions while artifacts are being pulled."""
AVOID_S = 10.0
"""Seconds before a failed source is dialled again."""
LINGER_S = 1.0
"""Seconds for which idle links stay open, because a peer that is behind will soon pull more."""
HOPELESS_S = 5.0
"""Seconds without any source after which an artifact may come from the parent or a mirror."""

DialSource = Callable[[Puller, Place], Awaitable[PullSource]]
"""Opens a link to a source without starting it. Raises P2PCastError."""


def source_dialler(node: ReceivingNode, connector: Connector) -> DialSource:
    async def dial(puller: Puller, place: Place) -> PullSource:
        return await connector.reach(partial(PullSource, node, puller), place, STRIPES)

    return dial


class SourceDirectory(Protocol):
    """The hub (rollout_node.control.hub_session), which knows which nodes hold an artifact."""

    @property
    def place(self) -> Place: ...
    def find_sources(self, artifact: bytes, without: list[bytes]) -> None: ...


class PushingParent(Protocol):
    """A parent, which may push an artifact or serve as one of its sources."""

    @property
    def offers(self) -> Collection[bytes]: ...
    async def decline(self, artifact: bytes) -> bool: ...


class ParentLink(Protocol):
    """The link to the current parent (rollout_node.sync.parent_failover)."""

    @property
    def place(self) -> Place | None: ...
    @property
    def feeding(self) -> PushingParent | None: ...


class PullingNode(ArtifactHolder, Protocol):
    """The part of the node into which artifacts are pulled."""

    excerpts: set[bytes]
    """Pulled artifacts of which only a part is needed."""
    pulled: set[bytes]
    """Artifacts that no parent may push."""

    @property
    def ident(self) -> bytes: ...
    @property
    def garbled(self) -> Mapping[bytes, int]:
        """Node id -> number of pieces from that node whose hash did not match."""

    @property
    def busy(self) -> bool:
        """Whether a version is passing through the node."""

    @property
    def busy_observers(self) -> Observers[[]]: ...
    @property
    def bytes_received(self) -> int: ...
    def update_busy(self) -> None: ...


@dataclass(slots=True)
class _Wish:
    since_s: float
    anchor: bool
    excerpt: Excerpt | None = None
    """The part that is needed; None means the whole artifact."""
    pieces: frozenset[int] | None = None
    """The pieces of that part; None until the directory has arrived."""
    begun: bool = False
    """Whether the parent has been asked to decline the artifact."""
    wanted: bool = False
    """Whether the artifact is in ``PullSchedule``."""
    sought_s: float | None = None
    places: list[Place] | None = None
    """The nodes in the hub's last answer; None before the first."""


class Downloader:
    """``fetch`` requests missing artifacts in the order in which they are needed; ``run`` pulls them until cancelled.
    The hub is asked which nodes hold an artifact. Its answer, if any, arrives through ``add_sources``.
    """

    def __init__(
        self,
        node: PullingNode,
        dial_source: DialSource,
        hub: SourceDirectory,
        parent: ParentLink,
    ) -> None:
        self._node = node
        self._dial_source = dial_source
        self._hub = hub
        self._parent = parent
        self._schedule = PullSchedule()
        self._wishes: dict[bytes, _Wish] = {}
        self._sources: dict[bytes, PullSource] = {}
        self._dials: dict[bytes, asyncio.Task[None]] = {}
        self._avoided: dict[bytes, float] = {}
        self._received = Throughput()
        self._rates: dict[bytes, int | None] = {}
        self._bell = Wakeup()
        self.ended = Wakeup()
        """Rings when an artifact is no longer being pulled, because it is here or comes from a different source."""
        self._idle_since_s = 0.0
        self.bytes_received = 0
        """Bytes of pieces received since startup."""
        node.busy_observers.add(self._set_rates)

    @property
    def sources(self) -> list[PullSource]:
        return list(self._sources.values())

    @property
    def artifacts(self) -> list[bytes]:
        return list(self._wishes)

    def fetch(self, artifact: bytes, *, anchor: bool) -> None:
        """Pull an artifact that the hub has sealed and nobody is sending."""
        if artifact not in self._wishes:
            self._wishes[artifact] = _Wish(asyncio.get_running_loop().time(), anchor)
            self._bell.notify()

    def fetch_part(self, artifact: bytes, excerpt: Excerpt, *, anchor: bool) -> None:
        """Pull a part of an artifact, which stays in the node as an excerpt until ``release``."""
        self.announce_part(artifact)
        self._wishes[artifact] = _Wish(asyncio.get_running_loop().time(), anchor, excerpt)
        self._bell.notify()

    def announce_part(self, artifact: bytes) -> None:
        """Expect a part of the artifact, pulled or from the mirror. It stays as an excerpt until ``release``."""
        self._node.excerpts.add(artifact)
        self._node.pulled.add(artifact)

    def release(self, artifacts: Collection[bytes]) -> None:
        """Stop needing the parts of these artifacts. Pieces that arrive later belong to other requests."""
        for artifact in artifacts:
            self._node.excerpts.discard(artifact)
            if artifact in self._wishes:
                self._end(artifact)
            self._node.pulled.discard(artifact)

    def fetches(self, artifact: bytes) -> bool:
        return artifact in self._wishes

    def add_sources(self, artifact: bytes, places: list[Place]) -> None:
        """Handle the hub's answer: the nodes that hold the artifact."""
        if (wish := self._wishes.get(artifact)) is not None:
            wish.places = [place for place in places if place[0] != self._node.ident]
            self._bell.notify()

    @property
    def sourceless(self) -> list[bytes]:
        """Artifacts pulled as a whole that have had no source for ``HOPELESS_S``."""
        return [artifact for artifact in self._without_source() if self._wishes[artifact].excerpt is None]

    @property
    def sourceless_parts(self) -> list[bytes]:
        """Artifacts pulled in part that have had no source for ``HOPELESS_S``."""
        return [artifact for artifact in self._without_source() if self._wishes[artifact].excerpt is not None]

    def _without_source(self) -> list[bytes]:
        if self._sources or self._dials:
            return []
        now = asyncio.get_running_loop().time()
        return [artifact for artifact, wish in self._wishes.items() if now - wish.since_s > HOPELESS_S]

    def drop(self, artifact: bytes) -> None:
        """Stop pulling an artifact that no node holds any more, or that comes from a different source."""
        if artifact in self._wishes:
            self._end(artifact)

    # -- Puller

    def held(self, source: PullSource, artifact: bytes, pieces: Sequence[int], *, sealed: bool) -> None:
        self._schedule.holds(source.link.remote, artifact, pieces, sealed=sealed)
        self._bell.notify()

    def gone(self, source: PullSource, artifact: bytes) -> None:
        self._schedule.refused(source.link.remote, artifact, [0, limits.MAX_PIECES])

    def cancelled(self, source: PullSource, artifact: bytes, pieces: Sequence[int]) -> None:
        self._schedule.cancelled(source.link.remote, artifact, pieces)
        self._bell.notify()

    def expects(self, source: PullSource, artifact: bytes, piece: int) -> bool:
        return self._schedule.expects(source.link.remote, artifact, piece)

    def came(self, source: PullSource, artifact: bytes, piece: int) -> None:
        self._schedule.got(source.link.remote, artifact, piece)
        self._bell.notify()

    def received(self, source: PullSource, size: int) -> None:
        self.bytes_received += size
        self._schedule.received(source.link.remote, size, asyncio.get_running_loop().time())

    def owed(self, source: PullSource) -> bool:
        return self._schedule.owes(source.link.remote)

    # -- running

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._bell.wait(TICK_S if self._wishes else LINGER_S / 2 if self._sources else None)
                    self._tick(group, loop.time())
        finally:
            for source in self.sources:
                source.link.close()

    def _tick(self, group: asyncio.TaskGroup, now: float) -> None:
        self._node.update_busy()
        self._received.sample(now, {None: self._node.bytes_received})
        for artifact, wish in list(self._wishes.items()):
            if self._ended(artifact):
                self._end(artifact)
            elif not wish.begun:
                wish.begun = True
                self._node.pulled.add(artifact)
                group.create_task(self._begin(artifact), name=f"pull {artifact.hex()[:8]}")
            elif wish.wanted:
                self._know(artifact)
        if self._wishes:
            self._idle_since_s = now
            self._seek(now)
            self._find(group, now)
            self._decide(now)
        elif now - self._idle_since_s > LINGER_S:
            for source in self.sources:
                source.link.close()

    def _ended(self, artifact: bytes) -> bool:
        holding, pieces = self._node.holdings.get(artifact), self._wishes[artifact].pieces
        if holding is None:
            return False
        if pieces is not None and all(piece in holding.stored for piece in pieces):
            return True
        return not holding.incomplete

    def _end(self, artifact: bytes) -> None:
        del self._wishes[artifact]
        self._schedule.done(artifact)
        if artifact not in self._node.excerpts:
            self._node.pulled.discard(artifact)
        self.ended.notify()

    async def _begin(self, artifact: bytes) -> None:
        """Ask the parent to decline the artifact, then pull it. If the parent is already sending it, do not pull."""
        wish = self._wishes[artifact]
        parent = self._parent.feeding
        declined = parent is None or await parent.decline(artifact)
        if self._wishes.get(artifact) is not wish:
            return
        holding = self._node.holdings.get(artifact)
        if not declined or (holding is not None and holding.source is not None):
            self._end(artifact)
            return
        if holding is not None:
            holding.want()
        # Deltas are decoded in order. Anchors start at a random piece, so that peers pulling at the same time have
        # different pieces to exchange.
        self._schedule.want(artifact, fraction() if wish.anchor else 0.0)
        wish.wanted = True
        self._know(artifact)
        for source in self.sources:
            if source.has_stale_handle(artifact):
                source.link.close()
            else:
                source.request(artifact, [], seal=False)
        self._bell.notify()

    def _know(self, artifact: bytes) -> None:
        holding, wish = self._node.holdings.get(artifact), self._wishes[artifact]
        if holding is not None and holding.assembly.complete_directory:
            held = holding.artifact.held
            if wish.excerpt is not None and wish.pieces is None:
                wish.pieces = wish.excerpt.pieces(holding.assembly)
            # Pieces outside the needed part count as held.
            needless = (
                i
                for i in range(holding.assembly.pieces)
                if i in held or (wish.pieces is not None and i not in wish.pieces)
            )
            self._schedule.directory(artifact, holding.assembly.pieces, holding.open.piece, needless)

    def _seek(self, now: float) -> None:
        for artifact, wish in self._wishes.items():
            if wish.sought_s is None or (now - wish.sought_s > SEEK_S and len(self._sources) < SOURCES):
                wish.sought_s = now
                self._hub.find_sources(artifact, [*self._sources, *self._avoided][: limits.MAX_SOURCES])

    def _find(self, group: asyncio.TaskGroup, now: float) -> None:
        self._avoided = {node: at for node, at in self._avoided.items() if now - at < AVOID_S}
        places = {place[0]: place for wish in self._wishes.values() for place in wish.places or ()}
        parent, link = self._parent.place, self._parent.feeding
        if parent is not None and link is not None and any(artifact in link.offers for artifact in self._wishes):
            places.setdefault(parent[0], parent)
        hub = self._hub.place
        places = {node: place for node, place in places.items() if node != hub[0] and not self._node.garbled.get(node)}
        able = [
            p
            for node, p in places.items()
            if node not in self._sources and node not in self._dials and node not in self._avoided
        ]
        for place in able[: max(0, SOURCES - len(self._sources) - len(self._dials))]:
            self._dial(group, place)
        if self._dials or hub[0] in self._sources or hub[0] in self._avoided:
            return
        if any(wish.places is None and now - wish.since_s < ANSWER_S for wish in self._wishes.values()):
            return
        wanted = {artifact: wish.since_s for artifact, wish in self._wishes.items()}
        if any(
            a not in source.answered and now - max(source.since_s, at) < SEEK_S
            for source in self.sources
            for a, at in wanted.items()
        ):
            return
        # All peers share the hub's uplink, so the hub is a source only if pieces are missing or sources are few.
        if len(self._sources) < ENOUGH or not all(self._schedule.whole(a) for a, w in self._wishes.items() if w.wanted):
            self._dial(group, hub)

    def _dial(self, group: asyncio.TaskGroup, place: Place) -> None:
        self._dials[place[0]] = group.create_task(self._serve(place), name=f"pull from {show_address(*place[1:])}")

    async def _serve(self, place: Place) -> None:
        """Pull from one source, from dialling until the link closes."""
        node = place[0]
        loop = asyncio.get_running_loop()
        try:
            source = await self._dial_source(self, place)
        except P2PCastError as error:
            logger.info("cannot pull from %s: %s", show_address(*place[1:]), error)
            self._avoided[node] = loop.time()
            return
        finally:
            del self._dials[node]
            self._bell.notify()
        self._sources[node] = source
        self._schedule.found(node, loop.time())
        source.start()
        for artifact, wish in self._wishes.items():
            if wish.wanted:
                source.request(artifact, [], seal=False)
        self._set_rates()
        ended: P2PCastError | None = None
        try:
            ended = await source.run()
        finally:
            del self._sources[node]
            self._schedule.lost(node)
            self._rates.pop(node, None)
            self._set_rates()
            self._bell.notify()
        if self._wishes and not any(map(source.has_stale_handle, self._wishes)):
            self._avoided[node] = loop.time()
        if ended is not None:
            logger.info("no longer pulling from %s: %s", source.link.name, ended)

    def _decide(self, now: float) -> None:
        if self._node.busy:
            # The sources were asked to send slowly, so a low rate is no reason to leave them.
            for node in self._sources:
                self._schedule.received(node, 0, now)
        for instruction in self._schedule.decide(now):
            source = self._sources.get(instruction.source)
            if source is None:
                continue
            if isinstance(instruction, RequestPieces):
                source.request(instruction.artifact, instruction.pieces, seal=instruction.seal)
            elif isinstance(instruction, CancelPieces):
                source.cancel(instruction.artifact, instruction.pieces)
            elif isinstance(instruction, LeaveParent):
                source.link.abort(RetryableError(f"{source.link.name} {instruction.why}"))

    def _set_rates(self) -> None:
        """Send every source its rate limit if that has changed by at least a factor of two."""
        rate = pull_bytes_s(self._received.peak_bytes_s, len(self._sources)) if self._node.busy else None
        for node, source in self._sources.items():
            was = self._rates.get(node)
            if rate != was and (rate is None or was is None or not 0.5 < rate / was < 2):
                self._rates[node] = rate
                source.set_rate(rate)
