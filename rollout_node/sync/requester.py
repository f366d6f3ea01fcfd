"""Requests the artifacts on the path to the newest version that nobody is sending
(``rollout_node.sync.source_choice``).

Guarantees:

- No artifact is requested twice, or while it is being received.
- A partly received artifact that is no longer on any path is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.relay.upstream import Upstream
from rollout_node.control.artifact_catalog import ArtifactCatalog, Entry
from rollout_node.shadow.shadow_state import ShadowState
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.mirror_catalog import MirrorCatalog, NoMirror
from rollout_node.sync.missing_versions import MissingVersions
from rollout_node.sync.parent_failover import ParentFailover
from rollout_node.sync.source_choice import SourceChoice, choose_source, needs_source
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")

PATIENCE_S = 2.0
"""Seconds for which a parent may leave out an artifact that the hub has sealed, before it is pulled."""


@dataclass(eq=False, repr=False, kw_only=True)
class Requester:
    """``ask_squash`` asks the hub for a squash from a version, and returns False while the hub is unreachable."""

    planner: VersionPlanner
    state: ShadowState
    catalog: ArtifactCatalog
    node: ArtifactHolder
    parent_failover: ParentFailover
    downloader: Downloader
    missing_versions: MissingVersions
    mirror: MirrorCatalog | NoMirror
    ask_squash: Callable[[Version], bool]
    give_up: Callable[[Holding], None]

    async def run(self) -> None:
        await self.planner.begun.wait()
        while True:
            incomplete = self.request(asyncio.get_running_loop().time())
            await self.planner.news.wait(PATIENCE_S / 4 if incomplete else None)

    def request(self, now: float) -> bool:
        """Request what is missing now. Returns whether anything is missing that may have to be requested later."""
        live = self.parent_failover.feeding
        path = self.planner.path()
        if self._awaits_squash(path, now):
            return True
        self._give_up_needless()
        incomplete = self.missing_versions.check(path, live, now)
        self._redirect_sourceless(live)
        first_only = self._first_only(path)
        for edge in path:
            entry = self.catalog.get(edge.artifact)
            if first_only and edge is not path[0] and edge.artifact not in self.node.holdings and _is_sealed(entry):
                incomplete = True
                continue
            incomplete |= self._request(edge, entry, live, now)
        return incomplete

    def _request(self, edge: Edge, entry: Entry | None, live: Upstream | None, now: float) -> bool:
        """Request an artifact if necessary. True if it is missing and no source was asked for all of it."""
        artifact, holding = edge.artifact, self.node.holdings.get(edge.artifact)
        ask = choose_source(
            holding,
            pulled=self.downloader.fetches(artifact),
            offered=live is not None and artifact in live.offers,
            sealed_bytes=entry.size if entry is not None and entry.sealed else None,
            mirrored=self.mirror.in_use and artifact in self.mirror.entries,
            overdue=lambda: entry is not None and self._is_overdue(artifact, entry, live, now),
        )
        if ask is SourceChoice.NONE:
            return False
        if holding is not None:
            holding.want()
        if ask is SourceChoice.PARENT and live is not None:
            live.want(artifact)
            return False
        if ask is SourceChoice.PEERS:
            self.downloader.fetch(artifact, anchor=edge.base is None)
        return True

    def _redirect_sourceless(self, live: Upstream | None) -> None:
        """Get artifacts that have no pull source from the parent or the mirror."""
        for artifact in self.downloader.sourceless:
            if live is not None and artifact in live.offers:
                self.downloader.drop(artifact)
                live.want(artifact)
            elif self.mirror.in_use and artifact in self.mirror.entries:
                self.downloader.drop(artifact)

    def _first_only(self, path: list[Edge]) -> bool:
        """Whether to fetch only the whole state for now: once it is here, a squash may be smaller than the deltas."""
        return self.planner.squashes.asks and len(path) > 2 and path[0].base is None and self._is_incomplete(path[0])

    def _awaits_squash(self, path: list[Edge], now: float) -> bool:
        """Whether to wait before following the path, because a squash from exactly here is coming or has just been
        requested. If the path starts with a whole state, the squash starts there, and is made meanwhile.
        """
        state_bytes = self.planner.state_bytes
        held, behind = self.state.staged, path
        if path and path[0].base is None:
            held, behind = path[0].version, path[1:]
        missing = [
            e
            for e in behind
            if not self.downloader.fetches(e.artifact) and needs_source(self.node.holdings.get(e.artifact))
        ]
        base = self.planner.squashes.should_ask(held, missing, state_bytes)
        if base is not None and self.ask_squash(base):
            logger.info("%d artifacts behind version %s: asking for one in their place", len(missing), path[-1].version)
            self.planner.squashes.asked(base, now)
        waits = bool(missing) and self.planner.squashes.waits(held, self.planner.edges(), state_bytes, now)
        return waits and not (path[0].base is None and self._is_incomplete(path[0]))

    def _is_incomplete(self, edge: Edge) -> bool:
        holding = self.node.holdings.get(edge.artifact)
        return holding is None or holding.incomplete

    def _give_up_needless(self) -> None:
        """Give up partly received artifacts without a source or a path: their decoders would wait for ever."""
        needed: frozenset[bytes] | None = None
        for holding in list(self.node.holdings.values()):
            if holding.excerpt:
                continue
            if holding.idle or (needs_source(holding) and not self.downloader.fetches(holding.id)):
                needed = self.planner.needed() if needed is None else needed
                if _is_sealed(self.catalog.get(holding.id)) and holding.id not in needed:
                    self.give_up(holding)

    def _is_overdue(self, artifact: bytes, entry: Entry, live: Upstream | None, now: float) -> bool:
        """Whether the parent will not push an artifact that it has not offered. A lost parent is replaced in a moment,
        and a parent still sending an earlier version gets to this one later.
        """
        if live is not None and artifact in live.withheld:
            self.missing_versions.complain(artifact, live, now)
            return True
        receiving, moved_at = self.parent_failover.receiving, self.parent_failover.moved_at
        if receiving is not None and receiving < entry.version:
            return False
        if live is not None and live.attached.is_set() and entry.sealed_at < moved_at:
            return True
        late = now - max(entry.sealed_at, moved_at) > PATIENCE_S
        if late and live is not None and artifact not in self.node.holdings:
            self.missing_versions.on_missed(artifact, live, now)
        return late


def _is_sealed(entry: Entry | None) -> bool:
    return entry is not None and entry.sealed
