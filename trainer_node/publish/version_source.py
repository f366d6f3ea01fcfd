"""The sources of a version's weights: a checkpoint folder, or a trainer's ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.join_parts import assemble
from p2pcast.codec.kernel_warmup import warm_up_for
from p2pcast.codec.layout import Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from trainer_node.publish.delta_builder import DeltaBuilder, Incoming, each, encode_folder, join_incoming

Files = dict[str, bytes]
"""Small files of a version: path → contents."""


class VersionSource(Protocol):
    async def encode(self, shadow: Shadow, builder: DeltaBuilder, choice: Choice) -> Files | None:
        """Add all cells to ``builder``, encoded against ``shadow``, and return the small files, or None to keep the
        base's. Raises IntegrityError, LocalError, and whatever made the version fail.
        """
        ...

    async def fill(self, folder: Path, layout: Layout, version: Version) -> tuple[Shadow, Files]:
        """Return a new shadow in ``folder`` with the whole state. Raises the same errors as ``encode``."""
        ...


class FolderSource:
    """An open checkpoint. ``files``: its small files, already read."""

    def __init__(self, checkpoint: Checkpoint, files: Files, staging: Staging) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self._staging = staging

    async def encode(self, shadow: Shadow, builder: DeltaBuilder, choice: Choice) -> Files | None:
        await self._staging.run(encode_folder, self._checkpoint, shadow, builder, choice)
        return self._files

    async def fill(self, folder: Path, layout: Layout, version: Version) -> tuple[Shadow, Files]:
        return await self._staging.new_shadow(folder, layout, version, self._checkpoint.lent, None), self._files


def merged_files(base: Files, more: Files) -> Files:
    """Return ``base`` with ``more`` added or replaced. Raises RemoteError if a file would be below another one."""
    found = {**base, **more}
    for path in found:
        parts = path.split("/")
        if above := {"/".join(parts[:n]) for n in range(1, len(parts))} & found.keys():
            raise RemoteError(f"the file {path!r} lies below the file {min(above)!r} of this or an earlier version")
    if len(found) > limits.MAX_FILES or sum(map(len, found.values())) > limits.MAX_FILES_BYTES:
        raise RemoteError(f"{len(found)} small files, with those of earlier versions, are too many or too large")
    return found


class RankSource:
    """Cells from ranks. ``base_files`` returns the newest version's small files except the given paths; it blocks.
    Files that the ranks send with a delta are added to these, or replace those at the same path; with a whole state
    they replace all of them.
    """

    def __init__(self, incoming: Incoming, staging: Staging, base_files: Callable[[Collection[str]], Files]) -> None:
        self._incoming = incoming
        self._staging = staging
        self._base_files = base_files

    async def encode(self, shadow: Shadow, builder: DeltaBuilder, choice: Choice) -> Files | None:
        await join_incoming(self._incoming, shadow, builder, choice, self._staging)
        if self._incoming.files is None:
            return None
        return merged_files(await self._staging.run(self._base_files, self._incoming.files), self._incoming.files)

    async def fill(self, folder: Path, layout: Layout, version: Version) -> tuple[Shadow, Files]:
        shadow = await self._staging.run(_empty_shadow, folder, layout)
        try:
            with shadow.filling(version) as put:
                await each(
                    self._incoming,
                    lambda c: put(c.cell, assemble(c.cell, c.parts)),
                    lambda row, idle: None,
                    self._staging,
                )
            if self._incoming.files is not None:
                return shadow, self._incoming.files
            return shadow, await self._staging.run(self._base_files, ())
        except BaseException:
            shadow.close()
            raise


def _empty_shadow(folder: Path, layout: Layout) -> Shadow:
    warm_up_for(layout)
    return Shadow.create(folder, layout)
