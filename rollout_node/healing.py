"""Cells of the shadow that have rotted, and small files of a version that are not here: put right from what lies on disk, and where that is gone or has rotted
too, from other nodes, which are asked for those cells alone.

Promises: what comes from others are pieces of artifacts that the run's key has signed, checked as any piece is; so whoever sends them, a cell is what the trainer
made or stays as it is. What is asked of whom is the way of the fewest predicted bytes; versions go before it, as before all that is pulled. Nothing of it
is kept, offered or installed, and while it comes the shadow is read as before. An artifact on our own disk that turns out to be damaged is let go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import blake3

from p2pcast.artifact.records import FileEntry, Manifest
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError, P2PCastError
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.relay.excerpt import Excerpt, expected_bytes
from p2pcast.relay.holding import Holding
from p2pcast.state.replay import WordsOf, along, heal, way_to
from p2pcast.state.shadow import Shadow
from p2pcast.version import Version

if TYPE_CHECKING:
    from rollout_node.peer import Peer

logger = logging.getLogger("p2pcast.peer")

TRIES = 4
"""Ways that are tried, before the shadow is made anew: each damaged artifact on disk costs one."""
PAUSE_S = 0.25
"""Before what did not come is asked for again; twice as long each time."""
LOOK_S = 0.5
"""Between two looks whether there is still anybody to fetch from."""

Still = Callable[[], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Way:
    edges: list[Edge]
    base: WordsOf | None
    """The base folder's words, where that is where it begins."""

    @property
    def bytes(self) -> int:
        return sum(edge.bytes for edge in self.edges)


class Healing:
    """``mend`` by whoever moves the shadow, one call at a time."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._spoilt_base = False
        self._asked: set[bytes] = set()
        """Artifacts of which others were asked for a part."""
        self._left_out: set[bytes] = set()
        """Hashes of small files that nobody had."""

    async def mend(self, shadow: Shadow, rotten: Sequence[Cell], still: Still) -> bool:
        """Whether every one of these cells is right again. ``still``: held while cells are written, when nobody may read the shadow."""
        logger.error("%d cells of the shadow have rotted", len(rotten))
        version, left = shadow.version, list(rotten)
        excerpts: dict[bytes, Holding] = {}
        self._spoilt_base = False
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
                    stay = await self._peer.staging.run(heal, shadow, left, along(way.edges, self._whole() | excerpts, way.base))
                left = [cell for cell, _ in stay]
                if not left:
                    return True
                logger.error("%d of them could not be put right from there: %s", len(stay), stay[0][1])
                if not await self._sifted(way, left, excerpts):
                    break
        finally:
            self._say(version, len(rotten) - len(left), excerpts.values())
            await self._release()
        return False

    async def complete(self, version: Version, layout: Layout, *, deep: bool = False) -> None:
        """Have all small files of a version here. ``deep``: those that are here are read. What can be had of nobody is told, and left out."""
        lacking = await self._lacking(version, deep=deep)
        if lacking is not None and {file.hash for file in lacking} <= self._left_out:
            return
        for attempt in range(TRIES):
            if await self._collect(version, layout):
                break
            await asyncio.sleep(PAUSE_S * 2**attempt)
        lacking = await self._lacking(version)
        if lacking is None:
            logger.warning("nobody can say which small files version %s has", version)
        elif lacking:
            self._left_out |= {file.hash for file in lacking}
            logger.warning("version %s goes without small files: %s", version, ", ".join(file.path for file in lacking))

    async def _lacking(self, version: Version, *, deep: bool = False) -> list[FileEntry] | None:
        """Small files of a version that are not here; None where it is not known which it has."""
        store = self._peer.store
        if store.manifest(version) is None:
            return None
        return await self._peer.staging.run(partial(store.lacking, version, deep=deep))

    async def _collect(self, version: Version, layout: Layout) -> bool:
        """False where trying again may help: something that should have come did not, or what was here is damaged."""
        store, here = self._peer.store, self._whole()
        edges = [Edge(a, h.open.base, h.open.version, 0) for a, h in here.items()]
        others = [e for e in self._listed(layout) if e.artifact not in here]
        edges += [Edge(e.artifact, e.base, e.version, expected_bytes(e, (), layout)) for e in others]
        self._asked.clear()
        excerpts: dict[bytes, Holding] = {}
        try:
            # Contents lie where a file was new, and all of them in a whole state.
            for edge in reversed(way_to(version, edges) or [e for e in edges if e.version == version][:1]):
                if store.manifest(version) is None:
                    if not await self._fetched([edge], Excerpt(), excerpts, version):
                        return False
                    store.note(_manifest(excerpts[edge.artifact]))
                lacking = frozenset(file.hash for file in await self._lacking(version, deep=True) or ())
                if not lacking:
                    break
                if not await self._fetched([edge], Excerpt(files=lacking), excerpts, version):
                    return False
                holding = excerpts.get(edge.artifact) or here[edge.artifact]
                try:
                    found = await self._peer.staging.run(_contents, holding, lacking)
                except P2PCastError as error:
                    await self._let_go(holding, error)
                    return False
                await self._peer.staging.run(store.keep_files, found)
        finally:
            await self._release()
        return True

    def _say(self, version: Version, cells: int, excerpts: Iterable[Holding]) -> None:
        if not cells:
            return
        fetched = sum(excerpt.artifact.held.count * excerpt.open.piece for excerpt in excerpts)
        self._peer.chronicle.healed(version, cells, fetched)
        whence = f"what others hold: {fetched / 1e6:.2f} MB" if fetched else "what lies on disk"
        logger.warning("%d cells of the shadow were put right from %s", cells, whence)

    # -- which way

    def _way(self, shadow: Shadow, cells: Collection[Cell], excerpts: Mapping[bytes, Holding]) -> _Way | None:
        """To the words of these cells; None where there is none, or where to begin anew is less to fetch."""
        layout, version = shadow.layout, shadow.version
        here = {**self._whole(), **excerpts}
        listed = self._listed(layout)
        edges = [Edge(a, h.open.base, h.open.version, 0) for a, h in here.items()]
        parts = [Edge(e.artifact, e.base, e.version, expected_bytes(e, cells, layout)) for e in listed if e.artifact not in here]
        base = None if self._spoilt_base else self._peer.following.base_at()
        found = way_to(version, [*edges, *parts], None if base is None else base[0])
        if found is None:
            return None
        begins = base[1] if base is not None and not (found and found[0].base is None) else None
        way = _Way(found, begins)
        whole = [
            Edge(e.artifact, e.base, e.version, expected_bytes(e, layout.cells, layout)) for e in listed if e.artifact not in here
        ]
        onward, anew = cheapest_path(version, [*edges, *whole]), cheapest_path(None, [*edges, *whole])
        if anew and way.bytes + sum(e.bytes for e in onward) > sum(e.bytes for e in anew):
            logger.info("a whole state is less to fetch than its cells that have rotted and what has come since")
            return None
        return way

    def _whole(self) -> dict[bytes, Holding]:
        return {h.id: h for h in self._peer.node.holdings.values() if h.finished}

    def _listed(self, layout: Layout) -> list[Edge]:
        """What others hold, by the word of the hub, or of a mirror."""
        wayfinding = self._peer.wayfinding
        return [edge for edge in wayfinding.listed() if wayfinding.layout_of(edge.artifact) == layout.layout_id]

    # -- from others

    async def _fetched(self, edges: Sequence[Edge], excerpt: Excerpt, excerpts: dict[bytes, Holding], version: Version) -> bool:
        """Whether that of all these artifacts is here: in the store, or now among ``excerpts``."""
        peer, here = self._peer, self._whole()
        had = {a for a, holding in excerpts.items() if _holds(holding, excerpt)}
        lacking = [edge for edge in edges if edge.artifact not in here and edge.artifact not in had]
        if not lacking:
            return True
        peer.following.say_busy("healing")
        logger.info(
            "%d cells and %d small files of version %s are asked of others, about %.2f MB of %d artifacts",
            len(excerpt.cells), len(excerpt.files), version, sum(e.bytes for e in lacking) / 1e6, len(lacking),
        )  # fmt: skip
        for edge in lacking:
            self._asked.add(edge.artifact)
            if peer.config.hub is None:
                peer.pulling.announce_part(edge.artifact)
                await self._from_mirror(edge.artifact, excerpt)
            else:
                peer.pulling.fetch_part(edge.artifact, excerpt, anchor=edge.base is None)
        while any(peer.pulling.fetches(edge.artifact) for edge in lacking):
            await peer.pulling.ended.wait(LOOK_S)
            for artifact in peer.pulling.hopeless_parts:
                await self._otherwise(artifact, excerpt)
        missing = 0
        for edge in lacking:
            holding = peer.node.holdings.get(edge.artifact)
            if holding is not None and _holds(holding, excerpt):
                excerpts[edge.artifact] = holding
            else:
                missing += 1
        if missing:
            logger.warning("%d of them could be had of nobody", missing)
        return not missing

    async def _otherwise(self, artifact: bytes, excerpt: Excerpt) -> None:
        """No node that holds it can be found. While the hub is away, too, that may change: then it is waited for, unless a mirror has it."""
        peer, mirrored = self._peer, self._peer.mirrored
        if mirrored is not None and mirrored.in_use and artifact in mirrored.entries:
            peer.pulling.drop(artifact)
            await self._from_mirror(artifact, excerpt)
        elif peer.control.connected:
            peer.pulling.drop(artifact)

    async def _from_mirror(self, artifact: bytes, excerpt: Excerpt) -> None:
        mirrored = self._peer.mirrored
        assert mirrored is not None
        try:
            await mirrored.fetch_part(artifact, excerpt)
        except P2PCastError as error:
            logger.warning("%s", error)

    async def _release(self) -> None:
        peer = self._peer
        peer.pulling.release(self._asked)
        for holding in [h for a in self._asked if (h := peer.node.holdings.get(a)) is not None and h.excerpt]:
            peer.node.give_up(holding)
            await peer.staging.run(peer.store.end_excerpt, holding.log, holding.id)

    # -- what turned out to be damaged

    async def _sifted(self, way: _Way, cells: Sequence[Cell], excerpts: Mapping[bytes, Holding]) -> bool:
        """Let go what lies on our disk and is not what was signed. False when all of the way is: then it is the marks that have rotted."""
        peer, found = self._peer, way.base is not None
        self._spoilt_base = way.base is not None
        excerpt, here = Excerpt(frozenset(cell.index for cell in cells)), self._whole()
        for edge in way.edges:
            if edge.artifact in excerpts or edge.artifact not in here:
                continue
            holding = here[edge.artifact]
            try:
                await peer.staging.run(_check, holding, excerpt)
            except P2PCastError as error:
                await self._let_go(holding, error)
                found = True
        return found

    async def _let_go(self, holding: Holding, error: P2PCastError) -> None:
        logger.error("version %s is let go from disk: %s", holding.open.version, error)
        self._peer.node.forget(holding.id)
        await self._peer.staging.run(self._peer.store.discard, holding.id)


def _holds(holding: Holding, excerpt: Excerpt) -> bool:
    assembly = holding.assembly
    return assembly.complete_directory and all(piece in holding.stored for piece in excerpt.pieces(assembly))


def _manifest(holding: Holding) -> Manifest:
    manifest = holding.assembly.manifest
    assert manifest is not None
    return manifest


def _contents(holding: Holding, wanted: Collection[bytes]) -> dict[str, bytes]:
    """Of the small files with these hashes, as far as the artifact has them. Raises IntegrityError, LocalError where it is damaged."""
    out: dict[str, bytes] = {}
    for file in _manifest(holding).files:
        if file.hash in wanted and file.offset is not None:
            contents = holding.log.read(file.offset, file.size)
            if blake3.blake3(contents).digest() != file.hash:
                raise IntegrityError(f"its small file {file.path!r} is damaged")
            out[file.path] = contents
    return out


def _check(holding: Holding, excerpt: Excerpt) -> None:
    """Raises IntegrityError where a piece in which it lies is not what was signed, LocalError where it cannot be read."""
    assembly = holding.assembly
    for piece in excerpt.pieces(assembly):
        data = holding.log.read(piece * assembly.open.piece, assembly.piece_bytes(piece) or 0)
        if blake3.blake3(data).digest() != assembly.piece_hash(piece):
            raise IntegrityError(f"piece {piece} of it does not match its hash any more")
