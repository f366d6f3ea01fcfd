"""Which artifacts lead a peer from the version that it has staged to the newest, and whom it asks for those that nobody sends.

Promises: it is the quickest way by what is known; nothing is asked for twice, and nothing that is on its way already; what lies on no way any more is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from p2pcast import limits
from p2pcast.bell import Bell
from p2pcast.parallel import cores
from p2pcast.relay.catchup import Edge
from p2pcast.relay.holding import Holding
from p2pcast.relay.upstream import Upstream
from p2pcast.version import Version
from rollout_node.catalog import Entry
from rollout_node.catching_up import CatchingUp

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")

PATIENCE_S = 2.0
"""How long a parent may take to open an artifact that the hub has sealed, before it is pulled."""
SMALL_BYTES = 256 * limits.KIB
"""What is no larger comes from the parent, if it has it: that takes no longer than looking for others, and disturbs a version that is on its way by no more than
20 ms at 100 Mbit/s."""


class Wayfinding:
    """``fetch`` runs until cancelled, once the peer has joined. ``news`` rings for whatever may have changed the way."""

    def __init__(self, peer: Peer) -> None:
        self.begun = asyncio.Event()
        """It is known what has to come over the wire."""
        self.news = Bell()
        self.squashes = CatchingUp(peer.config.squashes, cores())
        self.hold: Version | None = None
        """The shadow goes no further than this, by the hub's word."""
        self._peer = peer

    def path(self) -> list[Edge]:
        """From the version staged to the newest that the shadow may go to."""
        hold = self.hold
        way = self.squashes.way(
            self._peer.staged, [e for e in self._edges() if hold is None or e.version <= hold], self._state_bytes()
        )
        return [] if self._leads_back(way) else way

    def _leads_back(self, way: list[Edge]) -> bool:
        """A mirror may show less than it did, and so may the own disk. Where a shadow was lost meanwhile, that would take engines back: then nothing is done until it shows more, or a hub
        says otherwise."""
        mirrored, newest = self._peer.mirrored, self._peer.remembering.newest
        unsure = not self._peer.catalog.listed or (mirrored is not None and mirrored.in_use)
        return bool(way and unsure and newest is not None and way[-1].version < newest)

    def needed(self) -> frozenset[bytes]:
        """Artifacts that must not be let go: what leads on, past where the shadow is held, too."""
        return frozenset(
            e.artifact for e in (*self.path(), *self.squashes.way(self._peer.staged, self._edges(), self._state_bytes()))
        )

    def _state_bytes(self) -> int:
        layouts = self._peer.node.layouts.values() if self._peer.shadow is None else [self._peer.shadow.layout]
        return max((layout.nbytes for layout in layouts), default=0)

    def _edges(self) -> Collection[Edge]:
        edges = {e.artifact: e for e in self.listed()} | {
            h.id: Edge(h.id, h.open.base, h.open.version, self._bytes_left(h))
            for h in self._peer.node.holdings.values()
            if self._may_complete(h)
        }
        return edges.values()

    def listed(self) -> Collection[Edge]:
        """What others hold whole, by the word of the hub or of a mirror."""
        peer, mirrored = self._peer, self._peer.mirrored
        use = mirrored is not None and mirrored.in_use
        # What a hub that is gone has listed can be had of nobody, unless there is a parent.
        listed = peer.catalog.edges() if not use or peer.attachment.feeding is not None else {}
        return (listed | (mirrored.edges() if mirrored is not None and use else {})).values()

    def layout_of(self, artifact: bytes) -> bytes | None:
        """Of one that is listed."""
        mirrored = self._peer.mirrored
        entry = self._peer.catalog.get(artifact) or (None if mirrored is None else mirrored.entries.get(artifact))
        return None if entry is None else entry.layout

    def _bytes_left(self, holding: Holding) -> int:
        """What has still to come; of one that is still being made, nobody knows: it is taken for the cheapest."""
        manifest, entry = holding.assembly.manifest, self._peer.catalog.get(holding.id)
        whole = manifest.log if manifest is not None else entry.size if entry is not None else 0
        return max(0, whole - holding.artifact.held.count * holding.open.piece)

    def states(self) -> dict[Version, int]:
        """Digests of the versions that are known: by the hub; without one, by what is signed on the mirror and in the store here."""
        mirrored = self._peer.mirrored
        if mirrored is None or not mirrored.in_use:
            return self._peer.catalog.states()
        stored = {s.version: s.manifest.state for s in self._peer.store.artifacts.values()}
        return stored | {e.version: e.state for e in mirrored.entries.values()} | self._peer.catalog.states()

    def whole(self) -> list[tuple[Version, tuple[bytes, int]]]:
        mirrored = [] if self._peer.mirrored is None else self._peer.mirrored.entries.values()
        return self._peer.catalog.whole() + [(e.version, (e.layout, e.state)) for e in mirrored]

    def _may_complete(self, holding: Holding) -> bool:
        """What a hub was making when it died is on nobody's list: once nobody sends it any more, it leads nowhere. Nor does what a parent alone knows of, while the hub is heard."""
        mirrored = self._peer.mirrored
        comes = holding.completed_at is not None or holding.source is not None
        return not holding.excerpt and (
            (holding.completed_at is not None and holding.confirmed.is_set())
            or (comes and self._peer.node.is_listed(holding.id))
            or self._peer.catalog.get(holding.id) is not None
            or (mirrored is not None and mirrored.in_use and holding.id in mirrored.entries)
        )

    # -- what is asked for

    async def fetch(self) -> None:
        """Ask for what the way to the newest version needs and nobody sends."""
        await self.begun.wait()
        while True:
            waiting = self._ask()
            await self.news.wait(PATIENCE_S / 4 if waiting else None)

    def _ask(self) -> bool:
        """True when something is missing that may have to be asked for later."""
        peer = self._peer
        live, now = peer.attachment.feeding, asyncio.get_running_loop().time()
        path = self.path()
        if self._awaits_squash(path, now):
            return True
        self._give_up_needless()
        waiting = peer.lacking.look(path, live, now)
        mirrored = peer.mirrored.entries if peer.mirrored is not None and peer.mirrored.in_use else {}
        for artifact in peer.pulling.hopeless:
            if live is not None and artifact in live.offers:
                peer.pulling.drop(artifact)
                live.want(artifact)
            elif artifact in mirrored:
                peer.pulling.drop(artifact)
        # What follows a whole state may be less by the time that it is here.
        later = self.squashes.asks and len(path) > 2 and path[0].base is None and self._incomplete(path[0])
        for edge in path:
            holding, entry = peer.node.holdings.get(edge.artifact), peer.catalog.get(edge.artifact)
            if later and edge is not path[0] and holding is None and entry is not None and entry.sealed:
                waiting = True
                continue
            if holding is not None and (holding.completed_at is not None or holding.source is not None):
                continue
            if holding is not None:
                holding.idle = False
            if peer.pulling.fetches(edge.artifact):
                waiting = True
            elif live is not None and edge.artifact in live.offers:
                if entry is None or not entry.sealed or entry.size <= SMALL_BYTES:
                    live.want(edge.artifact)
                else:
                    peer.pulling.fetch(edge.artifact, anchor=edge.base is None)
                    waiting = True
            else:
                waiting = True
                if (
                    entry is not None
                    and entry.sealed
                    and edge.artifact not in mirrored
                    and self._forsaken(edge, entry, live, now)
                ):
                    peer.pulling.fetch(edge.artifact, anchor=edge.base is None)
        return waiting

    def _awaits_squash(self, path: list[Edge], now: float) -> bool:
        """Whether one from exactly here is on its way, or has just been asked for; then the way there is is not begun.

        Where the way begins with a whole state, it is asked for from there, and made while that comes in."""
        peer, state_bytes = self._peer, self._state_bytes()
        held, behind = self._peer.staged, path
        if path and path[0].base is None:
            held, behind = path[0].version, path[1:]
        missing = [e for e in behind if not peer.pulling.fetches(e.artifact) and self._lacking(e)]
        base = self.squashes.should_ask(held, missing, state_bytes)
        if base is not None and peer.control.ask_squash(base):
            logger.info("%d artifacts behind version %s: asking for one in their place", len(missing), path[-1].version)
            self.squashes.asked(base, now)
        waits = bool(missing) and self.squashes.waits(held, self._edges(), state_bytes, now)
        return waits and not (path[0].base is None and self._incomplete(path[0]))

    def _lacking(self, edge: Edge) -> bool:
        """Nothing of it is on its way."""
        holding = self._peer.node.holdings.get(edge.artifact)
        return holding is None or self._stands(holding)

    @staticmethod
    def _stands(holding: Holding) -> bool:
        return holding.completed_at is None and holding.source is None

    def _incomplete(self, edge: Edge) -> bool:
        holding = self._peer.node.holdings.get(edge.artifact)
        return holding is None or holding.completed_at is None

    def _give_up_needless(self) -> None:
        """What was half received and nobody sends, and lies on no way any more: who has begun to decode it would wait for ever."""
        peer = self._peer
        needed: frozenset[bytes] | None = None
        for holding in [
            h
            for h in peer.node.holdings.values()
            if not h.excerpt and (h.idle or (self._stands(h) and not peer.pulling.fetches(h.id)))
        ]:
            entry = self._peer.catalog.get(holding.id)
            needed = self.needed() if needed is None else needed
            if entry is not None and entry.sealed and holding.id not in needed:
                peer.receiving.give_up(holding)

    def _forsaken(self, edge: Edge, entry: Entry, live: Upstream | None, now: float) -> bool:
        """Whether the parent will not push what it does not have yet. One that is lost is replaced in a moment; one that is still sending an earlier version
        will come to it."""
        attachment = self._peer.attachment
        if live is not None and edge.artifact in live.withheld:
            self._peer.lacking.say(edge.artifact, live, now)
            return True
        coming = attachment.receiving
        if coming is not None and coming < entry.version:
            return False
        if live is not None and live.attached.is_set() and entry.sealed_at < attachment.moved_at:
            return True
        late = now - max(entry.sealed_at, attachment.moved_at) > PATIENCE_S
        if late and live is not None and edge.artifact not in self._peer.node.holdings:
            self._peer.lacking.missed(edge.artifact, live, now)
        return late
