"""Repairs corrupt cells of the shadow, from artifacts on disk or, if these are missing or damaged, from other nodes,
which are asked only for these cells.

Guarantees:

- Pieces from other nodes belong to artifacts signed with the run's key, and are verified like any other piece.
- So a cell gets the trainer's values, or stays as it is.

The path with the fewest predicted bytes is fetched; versions are fetched first. The fetched parts are not kept, offered
or installed, and the shadow stays readable meanwhile. A damaged artifact on this peer's disk is discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import blake3

from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError, P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_excerpt import Excerpt, expected_bytes
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.holding import Holding
from p2pcast.state.shadow import Shadow
from p2pcast.state.version_reader import WordsOf, reader_of_path, restore_cells, way_to
from rollout_node.shadow.base_folder import BaseFolder
from rollout_node.stage.part_fetcher import PartFetcher
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.version_path import VersionPlanner
from rollout_node.timeline import Timeline

logger = logging.getLogger("p2pcast.peer")

TRIES = 4
"""Number of paths to try before the shadow is rebuilt; each damaged artifact on disk uses one up."""
Still = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Way:
    edges: list[Edge]
    base: WordsOf | None
    """The base folder's words, if the path starts there."""

    @property
    def bytes(self) -> int:
        return sum(edge.bytes for edge in self.edges)


class ShadowRepair:
    """Repairs on request of the shadow's writer, one at a time. ``blocking`` runs a function in a thread."""

    def __init__(
        self,
        planner: VersionPlanner,
        base: BaseFolder | None,
        parts: PartFetcher,
        removal: ArtifactRemoval,
        timeline: Timeline,
        blocking: Callable[..., Awaitable[Any]],
    ) -> None:
        self._planner = planner
        self._base = base
        self._parts = parts
        self._removal = removal
        self._timeline = timeline
        self._blocking = blocking
        self._base_is_damaged = False

    async def repair_cells(self, shadow: Shadow, corrupt: Sequence[Cell], still: Still) -> bool:
        """Repair these cells, and return whether all of them are correct again. ``still`` keeps readers out while cells
        are written.
        """
        logger.error("%d cells of the shadow are corrupt", len(corrupt))
        version, left = shadow.version, list(corrupt)
        excerpts: dict[bytes, Holding] = {}
        self._base_is_damaged = False
        self._parts.begin()
        try:
            for _ in range(TRIES):
                way = self._way(shadow, left, excerpts)
                if way is None:
                    break
                excerpt = Excerpt(frozenset(cell.index for cell in left))
                if not await self._parts.fetch(way.edges, excerpt, excerpts, version):
                    continue
                async with still():
                    stay = await self._blocking(
                        restore_cells, shadow, left, reader_of_path(way.edges, excerpts | self._parts.whole(), way.base)
                    )
                left = [cell for cell, _ in stay]
                if not left:
                    return True
                logger.error("%d of them could not be repaired that way: %s", len(stay), stay[0][1])
                if not await self._discard_damaged(way, left, excerpts):
                    break
        finally:
            self._report_healed(version, len(corrupt) - len(left), excerpts.values())
            await self._parts.release()
        return False

    def _report_healed(self, version: Version, cells: int, excerpts: Iterable[Holding]) -> None:
        if not cells:
            return
        fetched = sum(excerpt.artifact.held.count * excerpt.open.piece for excerpt in excerpts)
        self._timeline.healed(version, cells, fetched)
        origin = f"other nodes ({fetched / 1e6:.2f} MB)" if fetched else "the disk"
        logger.warning("%d cells of the shadow were repaired from %s", cells, origin)

    # -- the path

    def _way(self, shadow: Shadow, cells: Collection[Cell], excerpts: Mapping[bytes, Holding]) -> _Way | None:
        """The path to these cells' words; None if there is none, or if fetching a new whole state takes fewer bytes."""
        layout, version = shadow.layout, shadow.version
        here = {**self._parts.whole(), **excerpts}
        listed = self._planner.listed_of(layout)
        edges = [Edge(a, h.open.base, h.open.version, 0) for a, h in here.items()]
        parts = [
            Edge(e.artifact, e.base, e.version, expected_bytes(e, cells, layout))
            for e in listed
            if e.artifact not in here
        ]
        base = None if self._base_is_damaged else self._base_version()
        found = way_to(version, [*edges, *parts], None if base is None else base[0])
        if found is None:
            return None
        begins = base[1] if base is not None and not (found and found[0].base is None) else None
        way = _Way(found, begins)
        whole = [
            Edge(e.artifact, e.base, e.version, expected_bytes(e, layout.cells, layout))
            for e in listed
            if e.artifact not in here
        ]
        onward, anew = cheapest_path(version, [*edges, *whole]), cheapest_path(None, [*edges, *whole])
        if anew and way.bytes + sum(e.bytes for e in onward) > sum(e.bytes for e in anew):
            logger.info("a whole state is less to fetch than the corrupt cells and the versions since")
            return None
        return way

    def _base_version(self) -> tuple[Version, WordsOf] | None:
        """The base folder's version and words, if its version is known."""
        if self._base is None or (version := self._base.version_among(self._planner.whole())) is None:
            return None
        return version, self._base.checkpoint.words

    # -- damaged artifacts

    async def _discard_damaged(self, way: _Way, cells: Sequence[Cell], excerpts: Mapping[bytes, Holding]) -> bool:
        """Discard stored artifacts that differ from what was signed. False if every artifact on the path is intact,
        which means that the shadow's digests are wrong.
        """
        found = way.base is not None
        self._base_is_damaged = way.base is not None
        excerpt, here = Excerpt(frozenset(cell.index for cell in cells)), self._parts.whole()
        for edge in way.edges:
            if edge.artifact in excerpts or edge.artifact not in here:
                continue
            holding = here[edge.artifact]
            try:
                await self._blocking(_check, holding, excerpt)
            except P2PCastError as error:
                logger.error("version %s is discarded from disk: %s", holding.open.version, error)
                await self._removal.discard(holding.id)
                found = True
        return found


def _check(holding: Holding, excerpt: Excerpt) -> None:
    """Raises IntegrityError if a piece of the excerpt differs from what was signed, LocalError if it is unreadable."""
    assembly = holding.assembly
    for piece in excerpt.pieces(assembly):
        data = holding.log.read(piece * assembly.open.piece, assembly.piece_bytes(piece) or 0)
        if blake3.blake3(data).digest() != assembly.piece_hash(piece):
            raise IntegrityError(f"piece {piece} of it does not match its hash any more")
