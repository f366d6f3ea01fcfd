"""Fetches parts of artifacts from other nodes or the mirror: the pieces that some cells or small files need.

Guarantees:

- Pieces from other nodes belong to artifacts signed with the run's key, and are verified like any other piece.
- The fetched parts are not kept, offered or installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_excerpt import Excerpt
from p2pcast.relay.artifact_path import Edge
from p2pcast.relay.holding import ArtifactHolder, Holding
from rollout_node.control.activity import Activity
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.mirror_source import MirrorSource

logger = logging.getLogger("p2pcast.peer")

CHECK_S = 0.5
"""Seconds between two checks for parts without a source."""


class HubLink(Protocol):
    @property
    def connected(self) -> bool: ...


class PartFetcher:
    """Call ``begin``, ``fetch`` and ``release``; only one part of the peer may do so at a time. ``hub``: None if the
    run has no hub, so that parts come only from the mirror.
    """

    def __init__(
        self,
        node: ArtifactHolder,
        downloader: Downloader,
        mirror: MirrorSource | None,
        hub: HubLink | None,
        removal: ArtifactRemoval,
        activity: Activity,
    ) -> None:
        self._node = node
        self._downloader = downloader
        self._mirror = mirror
        self._hub = hub
        self._removal = removal
        self._activity = activity
        self._asked: set[bytes] = set()
        """Artifacts of which a part has been requested."""

    def whole(self) -> dict[bytes, Holding]:
        """Artifacts that are completely here."""
        return {h.id: h for h in self._node.holdings.values() if h.finished}

    def begin(self) -> None:
        self._asked.clear()

    async def fetch(
        self, edges: Sequence[Edge], excerpt: Excerpt, excerpts: dict[bytes, Holding], version: Version
    ) -> bool:
        """Fetch that part of all these artifacts, and return whether it is here now."""
        here = self.whole()
        had = {a for a, holding in excerpts.items() if holds(holding, excerpt)}
        lacking = [edge for edge in edges if edge.artifact not in here and edge.artifact not in had]
        if not lacking:
            return True
        self._activity.enter("healing")
        logger.info(
            "%d cells and %d small files of version %s are requested, about %.2f MB of %d artifacts",
            len(excerpt.cells), len(excerpt.files), version, sum(e.bytes for e in lacking) / 1e6, len(lacking),
        )  # fmt: skip
        for edge in lacking:
            self._asked.add(edge.artifact)
            if self._hub is None:
                self._downloader.announce_part(edge.artifact)
                await self._from_mirror(edge.artifact, excerpt)
            else:
                self._downloader.fetch_part(edge.artifact, excerpt, anchor=edge.base is None)
        while any(self._downloader.fetches(edge.artifact) for edge in lacking):
            await self._downloader.ended.wait(CHECK_S)
            for artifact in self._downloader.sourceless_parts:
                await self._fetch_elsewhere(artifact, excerpt)
        missing = 0
        for edge in lacking:
            holding = self._node.holdings.get(edge.artifact)
            if holding is not None and holds(holding, excerpt):
                excerpts[edge.artifact] = holding
            else:
                missing += 1
        if missing:
            logger.warning("no node sent %d of them", missing)
        return not missing

    async def part(
        self, edge: Edge, excerpt: Excerpt, excerpts: dict[bytes, Holding], version: Version
    ) -> Holding | None:
        """Return a holding with that part of the artifact, perhaps complete by now; None if it is not here."""
        if not await self.fetch([edge], excerpt, excerpts, version):
            return None
        return self.whole().get(edge.artifact) or excerpts.get(edge.artifact)

    async def _fetch_elsewhere(self, artifact: bytes, excerpt: Excerpt) -> None:
        """Get a part for which the downloader has no source from the mirror, or give it up. While the hub is
        unreachable, keep it, because a source may still turn up.
        """
        mirror = self._mirror
        if mirror is not None and mirror.in_use and artifact in mirror.entries:
            self._downloader.drop(artifact)
            await self._from_mirror(artifact, excerpt)
        elif self._hub is not None and self._hub.connected:
            self._downloader.drop(artifact)

    async def _from_mirror(self, artifact: bytes, excerpt: Excerpt) -> None:
        assert self._mirror is not None, "a run without hub and mirror"
        try:
            await self._mirror.fetch_part(artifact, excerpt)
        except P2PCastError as error:
            logger.warning("%s", error)

    async def release(self) -> None:
        """Release the fetched parts, which are no longer needed."""
        self._downloader.release(self._asked)
        for holding in [h for a in self._asked if (h := self._node.holdings.get(a)) is not None and h.excerpt]:
            await self._removal.end_excerpt(holding)


def holds(holding: Holding, excerpt: Excerpt) -> bool:
    """Whether the holding's log contains the whole excerpt."""
    assembly = holding.assembly
    return assembly.complete_directory and all(piece in holding.stored for piece in excerpt.pieces(assembly))
