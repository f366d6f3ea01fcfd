"""What a peer lacks and nobody pushes: pulled from several nodes at once, piece by piece.

Promises: an artifact comes one way, pulled or pushed, never both; a source that dies, refuses, is slow or sends garbage costs its own share of the time and nothing
twice, since what it owed is asked of others at once; while a version is on its way here, sources are told to send a trickle. Whom to ask, for what: scattering.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from p2pcast import limits
from p2pcast.addresses import show_address
from p2pcast.bell import Bell
from p2pcast.errors import P2PCastError, RetryableError
from p2pcast.relay.excerpt import Excerpt
from p2pcast.relay.node import Node
from p2pcast.relay.scattering import Ask, Leave, Recall, Scattering
from p2pcast.relay.source import Source
from p2pcast.relay.upstream import Upstream
from p2pcast.relay.yielding import Throughput, trickle_bytes_s
from rollout_node.dialling import Dialling, Place

logger = logging.getLogger("p2pcast.peer")

SOURCES = 6
"""Links at one time: enough that one or two slow ones don't matter, few enough that a node's own children don't."""
ENOUGH = 2
"""With fewer sources than this the hub is asked, too."""
STRIPES = 3
"""Of a link over which is pulled: one for messages, the others for pieces, which are held back at times."""
SEEK_S = 3.0
"""Between two questions to the hub about sources."""
ANSWER_S = 1.0
"""For the hub's first answer, before it is itself turned to."""
LOOK_S = 0.05
"""Between two looks while something is pulled."""
SHUN_S = 10.0
"""A source that failed is not dialled again before this."""
LINGER_S = 1.0
"""Links are kept for so long when there is nothing to pull: laggards have more to fetch in a moment."""
HOPELESS_S = 5.0
"""Without any source after this, an artifact may come another way: pushed by a parent that has it, or from a mirror."""


class PullOwner(Protocol):
    def hub(self) -> Place: ...

    def parent(self) -> tuple[Place | None, Upstream | None]:
        """Where the parent listens, if that is known, and the link to it."""

    def seek(self, artifact: bytes, without: list[bytes]) -> None:
        """Ask the hub who has it. The answer comes by ``Pulling.told``, or not at all."""


@dataclass(slots=True)
class _Wish:
    since_s: float
    anchor: bool
    excerpt: Excerpt | None = None
    """What is wanted of it; None: all."""
    pieces: frozenset[int] | None = None
    """Where that lies, once the directory has come."""
    begun: bool = False
    """Nobody else sends it: it may be asked for."""
    wanted: bool = False
    """``Scattering`` knows of it."""
    sought_s: float | None = None
    places: list[Place] | None = None
    """By the hub's last word; None before the first."""


class Pulling:
    """``fetch`` says what is lacking, in the order in which it is needed; ``run`` gets it, until cancelled."""

    def __init__(self, node: Node, dialling: Dialling, owner: PullOwner) -> None:
        self._node = node
        self._dialling = dialling
        self._owner = owner
        self._scattering = Scattering()
        self._wishes: dict[bytes, _Wish] = {}
        self._sources: dict[bytes, Source] = {}
        self._dials: dict[bytes, asyncio.Task[None]] = {}
        self._shunned: dict[bytes, float] = {}
        self._received = Throughput()
        self._eased: dict[bytes, int | None] = {}
        self._bell = Bell()
        self.ended = Bell()
        """Rings when something is no longer pulled: it is here, or will not come this way."""
        self._idle_since_s = 0.0
        self.bytes_received = 0
        """Of pieces, in all."""
        node.on_busy.append(self._ease)

    @property
    def sources(self) -> list[Source]:
        return list(self._sources.values())

    @property
    def artifacts(self) -> list[bytes]:
        return list(self._wishes)

    def fetch(self, artifact: bytes, *, anchor: bool) -> None:
        """Nobody sends it, and the hub has sealed it."""
        if artifact not in self._wishes:
            self._wishes[artifact] = _Wish(asyncio.get_running_loop().time(), anchor)
            self._bell.ring()

    def fetch_part(self, artifact: bytes, excerpt: Excerpt, *, anchor: bool) -> None:
        """Some of it, for whoever asks: it stays in the node, as an excerpt, until ``release``."""
        self.announce_part(artifact)
        self._wishes[artifact] = _Wish(asyncio.get_running_loop().time(), anchor, excerpt)
        self._bell.ring()

    def announce_part(self, artifact: bytes) -> None:
        """A part of it will come, by whichever way: as an excerpt, until ``release``."""
        self._node.excerpts.add(artifact)
        self._node.pulled.add(artifact)

    def release(self, artifacts: Collection[bytes]) -> None:
        """Those of which a part was fetched are not needed any more: what comes of them from now on comes for somebody else."""
        for artifact in artifacts:
            self._node.excerpts.discard(artifact)
            if artifact in self._wishes:
                self._end(artifact)
            self._node.pulled.discard(artifact)

    def fetches(self, artifact: bytes) -> bool:
        return artifact in self._wishes

    def told(self, artifact: bytes, places: list[Place]) -> None:
        """The hub's answer."""
        if (wish := self._wishes.get(artifact)) is not None:
            wish.places = [place for place in places if place[0] != self._node.ident]
            self._bell.ring()

    @property
    def hopeless(self) -> list[bytes]:
        """Artifacts for which no source could be found, and that may come another way."""
        return [artifact for artifact in self._sourceless() if self._wishes[artifact].excerpt is None]

    @property
    def hopeless_parts(self) -> list[bytes]:
        """As ``hopeless``, of those of which a part is wanted."""
        return [artifact for artifact in self._sourceless() if self._wishes[artifact].excerpt is not None]

    def _sourceless(self) -> list[bytes]:
        if self._sources or self._dials:
            return []
        now = asyncio.get_running_loop().time()
        return [artifact for artifact, wish in self._wishes.items() if now - wish.since_s > HOPELESS_S]

    def drop(self, artifact: bytes) -> None:
        """It is nowhere any more, or comes another way."""
        if artifact in self._wishes:
            self._end(artifact)

    # -- Puller

    def held(self, source: Source, artifact: bytes, pieces: list[int], *, sealed: bool) -> None:
        self._scattering.holds(source.link.remote, artifact, pieces, sealed=sealed)
        self._bell.ring()

    def gone(self, source: Source, artifact: bytes) -> None:
        self._scattering.refused(source.link.remote, artifact, [0, limits.MAX_PIECES])

    def unsent(self, source: Source, artifact: bytes, pieces: list[int]) -> None:
        self._scattering.unsent(source.link.remote, artifact, pieces)
        self._bell.ring()

    def expects(self, source: Source, artifact: bytes, piece: int) -> bool:
        return self._scattering.expects(source.link.remote, artifact, piece)

    def came(self, source: Source, artifact: bytes, piece: int) -> None:
        self._scattering.got(source.link.remote, artifact, piece)
        self._bell.ring()

    def heard(self, source: Source, size: int) -> None:
        self.bytes_received += size
        self._scattering.heard(source.link.remote, size, asyncio.get_running_loop().time())

    def owed(self, source: Source) -> bool:
        return self._scattering.owes(source.link.remote)

    # -- running

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._bell.wait(LOOK_S if self._wishes else LINGER_S / 2 if self._sources else None)
                    self._look(group, loop.time())
        finally:
            for source in self.sources:
                source.link.close()

    def _look(self, group: asyncio.TaskGroup, now: float) -> None:
        self._node.look()
        self._received.look(now, {None: self._node.bytes_received})
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
        return holding.completed_at is not None or holding.finished or holding.aborted

    def _end(self, artifact: bytes) -> None:
        del self._wishes[artifact]
        self._scattering.done(artifact)
        if artifact not in self._node.excerpts:
            self._node.pulled.discard(artifact)
        self.ended.ring()

    async def _begin(self, artifact: bytes) -> None:
        """First of all the parent agrees not to send it: or it does, and then it is not pulled."""
        wish = self._wishes[artifact]
        _, parent = self._owner.parent()
        declined = parent is None or await parent.decline(artifact)
        if self._wishes.get(artifact) is not wish:
            return
        holding = self._node.holdings.get(artifact)
        if not declined or (holding is not None and holding.source is not None):
            self._end(artifact)
            return
        if holding is not None:
            holding.idle = False
        # Deltas are decoded as they come; of anchors, several that pull at once take different parts, and have something to exchange.
        self._scattering.want(artifact, random.random() if wish.anchor else 0.0)
        wish.wanted = True
        self._know(artifact)
        for source in self.sources:
            if source.speaks_of_another(artifact):
                source.link.close()
            else:
                source.ask(artifact, [], seal=False)
        self._bell.ring()

    def _know(self, artifact: bytes) -> None:
        holding, wish = self._node.holdings.get(artifact), self._wishes[artifact]
        if holding is not None and holding.assembly.complete_directory:
            held = holding.artifact.held
            if wish.excerpt is not None and wish.pieces is None:
                wish.pieces = wish.excerpt.pieces(holding.assembly)
            # What is not wanted is as good as held.
            needless = (
                i for i in range(holding.assembly.pieces) if i in held or (wish.pieces is not None and i not in wish.pieces)
            )
            self._scattering.directory(artifact, holding.assembly.pieces, holding.open.piece, needless)

    def _seek(self, now: float) -> None:
        for artifact, wish in self._wishes.items():
            if wish.sought_s is None or (now - wish.sought_s > SEEK_S and len(self._sources) < SOURCES):
                wish.sought_s = now
                self._owner.seek(artifact, [*self._sources, *self._shunned][: limits.MAX_SOURCES])

    def _find(self, group: asyncio.TaskGroup, now: float) -> None:
        self._shunned = {node: at for node, at in self._shunned.items() if now - at < SHUN_S}
        places = {place[0]: place for wish in self._wishes.values() for place in wish.places or ()}
        parent, link = self._owner.parent()
        if parent is not None and link is not None and any(artifact in link.offers for artifact in self._wishes):
            places.setdefault(parent[0], parent)
        hub = self._owner.hub()
        places = {node: place for node, place in places.items() if node != hub[0] and not self._node.garbled[node]}
        able = [
            p for node, p in places.items() if node not in self._sources and node not in self._dials and node not in self._shunned
        ]
        for place in able[: max(0, SOURCES - len(self._sources) - len(self._dials))]:
            self._dial(group, place)
        if self._dials or hub[0] in self._sources or hub[0] in self._shunned:
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
        # The hub's uplink is everybody's: it is asked for what the others do not have, or where there are hardly any.
        if len(self._sources) < ENOUGH or not all(self._scattering.whole(a) for a, w in self._wishes.items() if w.wanted):
            self._dial(group, hub)

    def _dial(self, group: asyncio.TaskGroup, place: Place) -> None:
        self._dials[place[0]] = group.create_task(self._serve(place), name=f"pull from {show_address(*place[1:])}")

    async def _serve(self, place: Place) -> None:
        """One source, from dialling to its end."""
        node = place[0]
        loop = asyncio.get_running_loop()
        source = Source(self._node, self)
        try:
            source.link = await self._dialling.reach(source, place, STRIPES)
        except P2PCastError as error:
            logger.info("cannot pull from %s: %s", show_address(*place[1:]), error)
            self._shunned[node] = loop.time()
            return
        finally:
            del self._dials[node]
            self._bell.ring()
        self._sources[node] = source
        self._scattering.found(node, loop.time())
        source.start(source.link)
        for artifact, wish in self._wishes.items():
            if wish.wanted:
                source.ask(artifact, [], seal=False)
        self._ease()
        ended: P2PCastError | None = None
        try:
            ended = await source.run()
        finally:
            del self._sources[node]
            self._scattering.lost(node)
            self._eased.pop(node, None)
            self._ease()
            self._bell.ring()
        if self._wishes and not any(map(source.speaks_of_another, self._wishes)):
            self._shunned[node] = loop.time()
        if ended is not None:
            logger.info("no longer pulling from %s: %s", source.link.name, ended)

    def _decide(self, now: float) -> None:
        if self._node.busy:
            # They send little because they were told to: that is no reason to leave them.
            for node in self._sources:
                self._scattering.heard(node, 0, now)
        for instruction in self._scattering.decide(now):
            source = self._sources.get(instruction.source)
            if source is None:
                continue
            if isinstance(instruction, Ask):
                source.ask(instruction.artifact, instruction.pieces, seal=instruction.seal)
            elif isinstance(instruction, Recall):
                source.recall(instruction.artifact, instruction.pieces)
            elif isinstance(instruction, Leave):
                source.link.abort(RetryableError(f"{source.link.name} {instruction.why}"))

    def _ease(self) -> None:
        """Tell every source how fast it may send: only what is new to it."""
        rate = trickle_bytes_s(self._received.peak_bytes_s, len(self._sources)) if self._node.busy else None
        for node, source in self._sources.items():
            was = self._eased.get(node)
            if rate != was and (rate is None or was is None or not 0.5 < rate / was < 2):
                self._eased[node] = rate
                source.ease(rate)
