"""Repairs corrupt cells of the shadow and missing small files of a version. They come from artifacts on disk. Where
these are gone or damaged, they come from other nodes, which are asked for these cells alone.

Promises:

- Pieces from other nodes belong to artifacts that the run's key has signed, and are checked as any piece is.
- So a cell becomes what the trainer made, or stays as it is.

The way with the fewest predicted bytes is fetched; versions go first. The fetched parts are neither kept, offered nor
installed, and the shadow is readable meanwhile. A damaged artifact on this peer's disk is discarded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import blake3

from p2pcast.artifact.signed_records import FileEntry, Manifest
from p2pcast.backoff import Backoff
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, P2PCastError
from p2pcast.relay.artifact_excerpt import Excerpt, expected_bytes
from p2pcast.relay.artifact_path import Edge, cheapest_path
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.state.shadow import Shadow
from p2pcast.state.version_reader import WordsOf, reader_of_path, restore_cells, way_to
from p2pcast.store.artifact_store import Store
from p2pcast.version import Version
from rollout_node.control.activity import Activity
from rollout_node.control.hub_session import HubSession
from rollout_node.control.timeline import Timeline
from rollout_node.stage.base_folder import BaseFolder
from rollout_node.sync.disposal import Disposal
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.mirror_source import MirrorSource
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")

TRIES = 4
"""Number of ways that are tried before the shadow is made anew: each damaged artifact on disk costs one."""
PAUSE_S = 0.25
"""Before missing parts are requested again, in seconds; twice as long each time."""
CHECK_S = 0.5
"""Between two checks for parts without a source, in seconds."""

Still = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Way:
    edges: list[Edge]
    base: WordsOf | None
    """The base folder's words, where the way begins there."""

    @property
    def bytes(self) -> int:
        return sum(edge.bytes for edge in self.edges)


class ShadowRepair:
    """The shadow's writer asks for repairs, one at a time. ``hub`` None: the run has no hub, so parts come from the
    mirror alone. ``blocking`` runs a function in a thread.
    """

    def __init__(
        self,
        *,
        node: ArtifactHolder,
        store: Store,
        planner: VersionPlanner,
        base: BaseFolder | None,
        downloader: Downloader,
        mirror: MirrorSource | None,
        hub: HubSession | None,
        disposal: Disposal,
        timeline: Timeline,
        activity: Activity,
        blocking: Callable[..., Awaitable[Any]],
    ) -> None:
        self._node = node
        self._store = store
        self._planner = planner
        self._base = base
        self._downloader = downloader
        self._mirror = mirror
        self._hub = hub
        self._disposal = disposal
        self._timeline = timeline
        self._activity = activity
        self._blocking = blocking
        self._base_is_damaged = False
        self._asked: set[bytes] = set()
        """Artifacts of which others were asked for a part."""
        self._left_out: set[bytes] = set()
        """Hashes of small files that no node had."""

    async def repair_cells(self, shadow: Shadow, corrupt: Sequence[Cell], still: Still) -> bool:
        """Whether every one of these cells is right again. ``still`` excludes readers of the shadow while cells are
        written.
        """
        logger.error("%d cells of the shadow are corrupt", len(corrupt))
        version, left = shadow.version, list(corrupt)
        excerpts: dict[bytes, Holding] = {}
        self._base_is_damaged = False
        self._asked.clear()
        try:
            for _ in range(TRIES):
                way = self._way(shadow, left, excerpts)
                if way is None:
                    break
                excerpt = Excerpt(frozenset(cell.index for cell in left))
                if not await self._fetched(way.edges, excerpt, excerpts, version):
                    continue
                async with still():
                    stay = await self._blocking(
                        restore_cells, shadow, left, reader_of_path(way.edges, excerpts | self._whole(), way.base)
                    )
                left = [cell for cell, _ in stay]
                if not left:
                    return True
                logger.error("%d of them could not be repaired that way: %s", len(stay), stay[0][1])
                if not await self._discard_damaged(way, left, excerpts):
                    break
        finally:
            self._report_healed(version, len(corrupt) - len(left), excerpts.values())
            await self._release()
        return False

    async def complete(self, version: Version, layout: Layout, *, deep: bool = False) -> None:
        """Have all small files of a version here. ``deep``: the contents of those that are here are read. Files that no
        node has are logged and left out.
        """
        lacking = await self._lacking(version, deep=deep)
        if lacking is not None and {file.hash for file in lacking} <= self._left_out:
            return
        backoff = Backoff(PAUSE_S, PAUSE_S * 2**TRIES, None)
        for _ in range(TRIES):
            if await self._collect(version, layout):
                break
            await asyncio.sleep(backoff.next_s())
        lacking = await self._lacking(version)
        if lacking is None:
            logger.warning("no node says which small files version %s has", version)
        elif lacking:
            self._left_out |= {file.hash for file in lacking}
            logger.warning("version %s goes without small files: %s", version, ", ".join(file.path for file in lacking))

    async def _lacking(self, version: Version, *, deep: bool = False) -> list[FileEntry] | None:
        """Small files of a version that are not here; None while its list of files is unknown."""
        store = self._store
        if store.manifest(version) is None:
            return None
        lacking: list[FileEntry] = await self._blocking(partial(store.missing_files, version, deep=deep))
        return lacking

    async def _collect(self, version: Version, layout: Layout) -> bool:
        """False where another attempt may help: a part did not come, or a stored artifact was damaged."""
        store, here = self._store, self._whole()
        edges = [Edge(a, h.open.base, h.open.version, 0) for a, h in here.items()]
        others = [e for e in self._listed(layout) if e.artifact not in here]
        edges += [Edge(e.artifact, e.base, e.version, expected_bytes(e, (), layout)) for e in others]
        self._asked.clear()
        excerpts: dict[bytes, Holding] = {}
        try:
            # A file's contents lie in the delta that changed it; a whole state has all files.
            for edge in reversed(way_to(version, edges) or [e for e in edges if e.version == version][:1]):
                if store.manifest(version) is None:
                    if (holding := await self._part(edge, Excerpt(), excerpts, version)) is None:
                        return False
                    store.note(_manifest(holding))
                lacking = frozenset(file.hash for file in await self._lacking(version, deep=True) or ())
                if not lacking:
                    break
                if (holding := await self._part(edge, Excerpt(files=lacking), excerpts, version)) is None:
                    return False
                try:
                    found = await self._blocking(_contents, holding, lacking)
                except P2PCastError as error:
                    await self._discard(holding, error)
                    return False
                await self._blocking(store.keep_files, found)
        finally:
            await self._release()
        return True

    def _report_healed(self, version: Version, cells: int, excerpts: Iterable[Holding]) -> None:
        if not cells:
            return
        fetched = sum(excerpt.artifact.held.count * excerpt.open.piece for excerpt in excerpts)
        self._timeline.healed(version, cells, fetched)
        origin = f"other nodes ({fetched / 1e6:.2f} MB)" if fetched else "the disk"
        logger.warning("%d cells of the shadow were repaired from %s", cells, origin)

    # -- the way

    def _way(self, shadow: Shadow, cells: Collection[Cell], excerpts: Mapping[bytes, Holding]) -> _Way | None:
        """The way to the words of these cells; None where there is none, or a new whole state is less to fetch."""
        layout, version = shadow.layout, shadow.version
        here = {**self._whole(), **excerpts}
        listed = self._listed(layout)
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
        """The base folder's version and words, where its version is known."""
        if self._base is None or (version := self._base.version_among(self._planner.whole())) is None:
            return None
        return version, self._base.checkpoint.words

    def _whole(self) -> dict[bytes, Holding]:
        return {h.id: h for h in self._node.holdings.values() if h.finished}

    def _listed(self, layout: Layout) -> list[Edge]:
        """Artifacts that other nodes or the mirror hold."""
        planner = self._planner
        return [edge for edge in planner.listed() if planner.layout_of(edge.artifact) == layout.layout_id]

    # -- from other nodes

    async def _fetched(
        self, edges: Sequence[Edge], excerpt: Excerpt, excerpts: dict[bytes, Holding], version: Version
    ) -> bool:
        """Whether that part of all these artifacts is here now."""
        here = self._whole()
        had = {a for a, holding in excerpts.items() if _holds(holding, excerpt)}
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
            if holding is not None and _holds(holding, excerpt):
                excerpts[edge.artifact] = holding
            else:
                missing += 1
        if missing:
            logger.warning("no node sent %d of them", missing)
        return not missing

    async def _part(
        self, edge: Edge, excerpt: Excerpt, excerpts: dict[bytes, Holding], version: Version
    ) -> Holding | None:
        """A holding with that part of the artifact. The artifact may have come as a whole meanwhile, or have gone."""
        if not await self._fetched([edge], excerpt, excerpts, version):
            return None
        return self._whole().get(edge.artifact) or excerpts.get(edge.artifact)

    async def _fetch_elsewhere(self, artifact: bytes, excerpt: Excerpt) -> None:
        """The downloader has no source for the part: take it from the mirror, or give it up. While the hub is away, a
        source may still be found.
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

    async def _release(self) -> None:
        self._downloader.release(self._asked)
        for holding in [h for a in self._asked if (h := self._node.holdings.get(a)) is not None and h.excerpt]:
            await self._disposal.end_excerpt(holding)

    # -- damaged artifacts

    async def _discard_damaged(self, way: _Way, cells: Sequence[Cell], excerpts: Mapping[bytes, Holding]) -> bool:
        """Discard stored artifacts that are not what was signed. False when every artifact of the way is sound: then
        the shadow's digests are wrong.
        """
        found = way.base is not None
        self._base_is_damaged = way.base is not None
        excerpt, here = Excerpt(frozenset(cell.index for cell in cells)), self._whole()
        for edge in way.edges:
            if edge.artifact in excerpts or edge.artifact not in here:
                continue
            holding = here[edge.artifact]
            try:
                await self._blocking(_check, holding, excerpt)
            except P2PCastError as error:
                await self._discard(holding, error)
                found = True
        return found

    async def _discard(self, holding: Holding, error: P2PCastError) -> None:
        logger.error("version %s is discarded from disk: %s", holding.open.version, error)
        await self._disposal.discard(holding.id)


def _holds(holding: Holding, excerpt: Excerpt) -> bool:
    assembly = holding.assembly
    return assembly.complete_directory and all(piece in holding.stored for piece in excerpt.pieces(assembly))


def _manifest(holding: Holding) -> Manifest:
    manifest = holding.assembly.manifest
    assert manifest is not None
    return manifest


def _contents(holding: Holding, wanted: Collection[bytes]) -> dict[str, bytes]:
    """Path → contents of the small files with these hashes that the artifact has. Raises IntegrityError, LocalError
    where it is damaged.
    """
    out: dict[str, bytes] = {}
    for file in _manifest(holding).files:
        if file.hash in wanted and file.offset is not None:
            contents = holding.log.read(file.offset, file.size)
            if blake3.blake3(contents).digest() != file.hash:
                raise IntegrityError(f"its small file {file.path!r} is damaged")
            out[file.path] = contents
    return out


def _check(holding: Holding, excerpt: Excerpt) -> None:
    """Raises IntegrityError where a piece of the excerpt is not what was signed, LocalError where it is unreadable."""
    assembly = holding.assembly
    for piece in excerpt.pieces(assembly):
        data = holding.log.read(piece * assembly.open.piece, assembly.piece_bytes(piece) or 0)
        if blake3.blake3(data).digest() != assembly.piece_hash(piece):
            raise IntegrityError(f"piece {piece} of it does not match its hash any more")
