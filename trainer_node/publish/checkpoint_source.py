"""Publishes complete checkpoint folders, in step order.

Promises:

- A folder is opened once, and that object is published.
- A folder that changes meanwhile is left to the watcher, which reports it anew.

An error with a folder costs that version alone, and is reported. A folder that was published is not published again,
nor are the same weights under the same step.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.checkpoint.folder_form import FolderForm, Marker
from p2pcast.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.quantised.folder_opening import Opening
from p2pcast.sparse.budget_schedule import check_schedule
from p2pcast.state.staging import Staging
from trainer_node.publish.checkpoint_watcher import Damaged, Found, fingerprint_of, watch
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.published import Published
from trainer_node.publish.version_lifecycle import VersionLifecycle
from trainer_node.publish.version_source import Files, FolderSource

logger = logging.getLogger("p2pcast.hub")


class CheckpointSource:
    """``open_`` opens a complete folder."""

    def __init__(
        self,
        versions: VersionLifecycle,
        publishing: Pipeline,
        history: PublishHistory,
        staging: Staging,
        form: FolderForm,
        open_: Opening = Checkpoint.open,
    ) -> None:
        self._versions = versions
        self._publishing = publishing
        self._history = history
        self._staging = staging
        self._form = form
        self._open = open_

    async def run(self, checkpoints: Path) -> None:
        """Until cancelled. Raises LocalError when the hub's own disk fails."""
        async with contextlib.aclosing(
            watch(checkpoints, self._form, open_=self._open, known=self._is_published)
        ) as events:
            async for event in events:
                if isinstance(event, Damaged):
                    self._versions.skip(event.path.name, event.reason)
                else:
                    await self.take(event)
                del event  # closes the folder's files while no folder is published

    def _is_published(self, step: int, fingerprint: str) -> bool:
        return self._history[step].folder == fingerprint

    async def take(self, found: Found[Checkpoint]) -> None:
        """Publish a folder, unless it has changed by now."""
        name = found.path.name
        try:
            async with self._publishing.turn:
                await self._versions.until_may_begin()
                if (files := await self._staging.run(_read_files, found, self._form.marker)) is None:
                    return
                await self._publish(found, files)
        except P2PCastError as error:
            if not found.path.exists():
                self._versions.skip(name, "it was deleted while it was read")
            elif isinstance(error, LocalError) and self._versions.failed:
                raise
            else:
                self._versions.skip(name, await self._staging.run(_reason, found.path, self._open, error))

    async def _publish(self, found: Found[Checkpoint], files: Files) -> None:
        step, checkpoint, name = found.step, found.checkpoint, found.path.name
        same = await self._publishing.unchanged(step, checkpoint, self._history[step].mark)
        mark = None
        if same is not None:
            logger.info("%s has the weights of version %s: nothing to publish", name, same)
            version = same
        else:
            done = await self._publish_new(step, checkpoint, files)
            for path, why in checkpoint.skipped:
                logger.info("%s/%s is not part of the version: %s", name, path, why)
            await self._versions.finish(done)
            version, mark = done.version, self._publishing.mark_of(done.version)
        self._versions.unskip(name)
        await self._staging.run(self._history.note, step, folder=found.fingerprint, version=version, mark=mark)

    async def _publish_new(self, step: int, checkpoint: Checkpoint, files: Files) -> Published:
        """Try again once, under another number, if the hub's own shadow had to be repaired."""
        try:
            return await self._publish_as(step, checkpoint, files)
        except IntegrityError:
            if not await self._publishing.repair():
                raise
        return await self._publish_as(step, checkpoint, files)

    async def _publish_as(self, step: int, checkpoint: Checkpoint, files: Files) -> Published:
        version = self._publishing.version_for(step)
        self._versions.begin(version)
        source = FolderSource(checkpoint, files, self._staging)
        return await self._publishing.publish(version, checkpoint.layout(), source)


def _read_files(found: Found[Checkpoint], marker: Marker) -> Files | None:
    """The small files; None when the folder has changed since it was opened. The weights are read from the open files,
    so they belong to the same content. Blocks. Raises LocalError, and UsageError for a malformed schedule.
    """
    files = found.checkpoint.small_files()
    check_schedule(files)
    return files if fingerprint_of(found.step, found.path, marker) == found.fingerprint else None


def _reason(path: Path, open_: Opening, error: P2PCastError) -> str:
    """Why a folder could not be published: the present fault of the folder, if there is one. The words are those that
    the watcher will use for it, so that one fault is reported once.
    """
    try:
        open_(path)
    except P2PCastError as fault:
        return str(fault)
    return str(error)
