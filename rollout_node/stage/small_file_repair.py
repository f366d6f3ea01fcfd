"""Fetches the missing small files of a version, from artifacts on disk or from other nodes.

Guarantee: a file has the contents signed with the run's key, or is left out and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

import blake3

from p2pcast.artifact.signed_records import FileEntry, Manifest
from p2pcast.codec.layout import Layout
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import IntegrityError, P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_excerpt import Excerpt, expected_bytes
from p2pcast.relay.artifact_path import Edge
from p2pcast.relay.holding import Holding
from p2pcast.sparse import budget_schedule
from p2pcast.state.version_reader import way_to
from p2pcast.store.artifact_store import ArtifactStore
from rollout_node.stage.part_fetcher import PartFetcher
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.version_path import VersionPlanner

logger = logging.getLogger("p2pcast.peer")

TRIES = 4
"""Number of attempts; each damaged artifact on disk uses one up."""
PAUSE_S = 0.25
"""Seconds before missing parts are requested again; the delay doubles each time."""


class SmallFileRepair:
    """Called by the shadow's writer for one version at a time. ``blocking`` runs a function in a thread."""

    def __init__(
        self,
        store: ArtifactStore,
        planner: VersionPlanner,
        parts: PartFetcher,
        removal: ArtifactRemoval,
        blocking: Callable[..., Awaitable[Any]],
    ) -> None:
        self._store = store
        self._planner = planner
        self._parts = parts
        self._removal = removal
        self._blocking = blocking
        self._left_out: set[bytes] = set()
        """Hashes of small files that no node had."""

    async def complete(self, version: Version, layout: Layout, *, deep: bool = False) -> None:
        """Get all small files of a version. ``deep``: also read and check the contents of those already here. Files
        that no node has are logged and left out of later versions too, except a sparse-attention schedule.
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
            # Engines wait for their schedule, so that file is requested again with each later version.
            self._left_out |= {file.hash for file in lacking if file.path != budget_schedule.FILE}
            logger.warning("version %s goes without small files: %s", version, ", ".join(file.path for file in lacking))

    async def _lacking(self, version: Version, *, deep: bool = False) -> list[FileEntry] | None:
        """The version's small files that are not here; None if its list of files is unknown."""
        store = self._store
        if store.manifest(version) is None:
            return None
        lacking: list[FileEntry] = await self._blocking(partial(store.missing_files, version, deep=deep))
        return lacking

    async def _collect(self, version: Version, layout: Layout) -> bool:
        """Fetch the files. False if another attempt may help, because of a missing part or a damaged artifact."""
        store, here = self._store, self._parts.whole()
        edges = [Edge(a, h.open.base, h.open.version, 0) for a, h in here.items()]
        others = [e for e in self._planner.listed_of(layout) if e.artifact not in here]
        edges += [Edge(e.artifact, e.base, e.version, expected_bytes(e, (), layout)) for e in others]
        self._parts.begin()
        excerpts: dict[bytes, Holding] = {}
        try:
            # A file's contents are in the delta that changed it; a whole state contains all files.
            for edge in reversed(way_to(version, edges) or [e for e in edges if e.version == version][:1]):
                if store.manifest(version) is None:
                    if (holding := await self._parts.part(edge, Excerpt(), excerpts, version)) is None:
                        return False
                    store.note(_manifest(holding))
                lacking = frozenset(file.hash for file in await self._lacking(version, deep=True) or ())
                if not lacking:
                    break
                if (holding := await self._parts.part(edge, Excerpt(files=lacking), excerpts, version)) is None:
                    return False
                try:
                    found = await self._blocking(_contents, holding, lacking)
                except P2PCastError as error:
                    logger.error("version %s is discarded from disk: %s", holding.open.version, error)
                    await self._removal.discard(holding.id)
                    return False
                await self._blocking(store.keep_files, found)
        finally:
            await self._parts.release()
        return True


def _manifest(holding: Holding) -> Manifest:
    manifest = holding.assembly.manifest
    assert manifest is not None
    return manifest


def _contents(holding: Holding, wanted: Collection[bytes]) -> dict[str, bytes]:
    """The artifact's small files with these hashes: path → contents. Raises IntegrityError, LocalError if it is
    damaged.
    """
    out: dict[str, bytes] = {}
    for file in _manifest(holding).files:
        if file.hash in wanted and file.offset is not None:
            contents = holding.log.read(file.offset, file.size)
            if blake3.blake3(contents).digest() != file.hash:
                raise IntegrityError(f"its small file {file.path!r} is damaged")
            out[file.path] = contents
    return out
