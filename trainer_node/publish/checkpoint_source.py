"""Publishes complete checkpoint folders, in step order.

Guarantees:

- A folder is opened once, and what is published is read from that object.
- A folder that changes meanwhile is left to the watcher, which reports it again.

If a folder is faulty, only its version is lost, and the error is reported. A published folder is not published again,
nor is the same content under the same step. Small files are content: if only they differ from the newest version, they
make a new version. If only they differ from an older version, that is reported, so that no engine goes back for them.
A step for which the disk had no space is published once there is more, unless a newer step has come.
If this machine is short of anything else, ``run`` raises, and its next call takes the folder up again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from blake3 import blake3

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.checkpoint.folder_form import FolderForm, FolderMarkers
from p2pcast.files import disk
from p2pcast.files.atomic_files import is_full
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError
from p2pcast.ground.plain_text import decodable
from p2pcast.process.shortages import scarce
from p2pcast.quantised.folder_opening import Opening
from p2pcast.sparse.budget_schedule import check_schedule
from p2pcast.state.staging import Staging
from p2pcast.store.disk_room import check_room
from topology.version_sizes import RECORDS_BYTES
from trainer_node.publish.checkpoint_watcher import (
    Damaged,
    FoundCheckpoint,
    fingerprint_of,
    same_fingerprint,
    waits_for,
    watch,
)
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.published import Published
from trainer_node.publish.version_lifecycle import VersionLifecycle
from trainer_node.publish.version_source import Files, FolderSource

logger = logging.getLogger("p2pcast.hub")

_RECORDS = ("trainer_state.json", "_results.json", ".log")
"""Name endings of small files that trainers and evaluations write later and no engine reads. A version carries them,
but they are no reason to make one.
"""
_MORE = 10
"""A step that found no space is retried once there is a tenth more, so that small changes cause no attempts."""
_SHOWN = 10
"""Most paths in one message."""


@dataclass(frozen=True, slots=True)
class _Unroomed:
    """The newest step, for which there was no space. ``tried_with``: most bytes free before any attempt, by folder."""

    name: str
    tried_with: tuple[float, ...]


@dataclass(eq=False, repr=False)
class CheckpointSource:
    """``open_`` opens a complete folder. ``rooms``: folders in which a version needs space, the store's first.
    ``on_room`` is called with the error when a version found no space, and with None after a published version.
    """

    versions: VersionLifecycle
    publishing: Pipeline
    history: PublishHistory
    staging: Staging
    form: FolderForm
    open_: Opening = Checkpoint.open
    rooms: Sequence[Path] = ()
    _: KW_ONLY
    on_room: Callable[[BaseException | None], None] = lambda error: None
    _unroomed: _Unroomed | None = field(init=False, default=None)
    _was_short: bool = field(init=False, default=False)

    async def run(self, checkpoints: Path) -> None:
        """Publish until cancelled. Raises LocalError if the hub's own disk fails or this machine is short of something;
        it may then be called again.
        """
        if self._was_short:
            # A version that failed half-way has used up its number, and peers have received part of it.
            for room in self.rooms[:1]:
                await self.staging.run(check_room, room)
            await self.publishing.catch_up()
            self._was_short = False
        try:
            await self._take_all(checkpoints)
        except Exception as error:
            self._was_short = scarce(error)
            raise

    async def _take_all(self, checkpoints: Path) -> None:
        if (why := await self.staging.run(waits_for, checkpoints, self.form.names)) is not None:
            logger.info("%s", decodable(why))
        async with contextlib.aclosing(
            watch(checkpoints, self.form, open_=self.open_, known=self._is_published, again=self._again)
        ) as events:
            async for event in events:
                if isinstance(event, Damaged):
                    self.versions.skip(event.path.name, event.reason)
                else:
                    await self.take(event)
                del event  # closes the folder's files until the next folder comes

    def _again(self) -> str | None:
        """Return the name of a folder that found no space, once there is more, else None. Blocks."""
        waiting = self._unroomed
        more = waiting is not None and any(map(_is_more, _free(self.rooms), waiting.tried_with))
        return waiting.name if waiting is not None and more else None

    def _is_published(self, step: int, fingerprint: str) -> bool:
        known = self.history[step].folder
        same = same_fingerprint(known, fingerprint)
        if same and known != fingerprint:
            # A fingerprint of release 0.1: record the new form, which also detects a rewrite that keeps the mtime.
            self.history.note(step, folder=fingerprint)
        return same

    async def take(self, found: FoundCheckpoint[Checkpoint]) -> None:
        """Publish a folder unless it has changed since it was found."""
        name, before = found.path.name, self._unroomed
        free: tuple[float, ...] = ()
        self._unroomed = None
        try:
            async with self.publishing.turn:
                await self.versions.until_may_begin()
                free = await self.staging.run(_free, self.rooms)
                if (files := await self.staging.run(_read_files, found, self.form.marker)) is None:
                    return
                await self._publish(found, files)
        except P2PCastError as error:
            if not found.path.exists():
                self.versions.skip(name, "it was deleted while it was read")
            elif isinstance(error, LocalError) and self.versions.failed:
                raise
            elif scarce(error) and not is_full(error):
                self.versions.skip(name, str(error))
                raise
            else:
                why = await self.staging.run(_reason, found.path, self.open_, error)
                if is_full(error):
                    if before is not None and before.name == name:
                        # This limits the number of attempts, however much the free space varies.
                        free = tuple(map(max, free, before.tried_with))
                    self._unroomed = _Unroomed(name, free)
                    self.on_room(error)
                    why += "; this step is tried again when there is more room"
                self.versions.skip(name, why)

    async def _publish(self, found: FoundCheckpoint[Checkpoint], files: Files) -> None:
        step, checkpoint, name = found.step, found.checkpoint, found.path.name
        known, digest = self.history[step], _digest(files)
        same = await self.publishing.unchanged(step, checkpoint, known.mark)
        mark = None
        late = same is not None and known.files and known.files != digest
        other = [] if same is None else await self.staging.run(self.publishing.other_files, same, files)
        other = [path for path in other if not path.endswith(_RECORDS)]
        if late and same != self.publishing.head:
            self.versions.skip(
                name,
                f"its small files have changed since version {same} ({_named(other)}), and newer versions are out: "
                "write them into the next step's folder",
            )
            return
        if same is not None and not late:
            logger.info("%s has the weights of version %s: nothing to publish", name, same)
            if other:
                # The version came from ranks or --base, or an earlier release wrote the record.
                logger.warning("%s has other small files than version %s, which keeps its own: %s; write them into the "
                               "next step's folder", name, same, _named(other))  # fmt: skip
            version = same
        else:
            if same is not None:
                logger.info("%s has the weights of version %s and other small files: %s", name, same, _named(other))
            done = await self._publish_new(step, checkpoint, files)
            for path, why in checkpoint.skipped:
                logger.info("%s/%s is not part of the version: %s", name, path, why)
            await self.versions.finish(done)
            version, mark = done.version, self.publishing.mark_of(done.version)
        self.versions.unskip(name)
        self.on_room(None)
        brought = None if mark is None else digest
        await self.staging.run(
            self.history.note, step, folder=found.fingerprint, version=version, mark=mark, files=brought
        )

    async def _publish_new(self, step: int, checkpoint: Checkpoint, files: Files) -> Published:
        """Publish a version. If the hub's own shadow had to be repaired, retry once, under a new number."""
        try:
            return await self._publish_as(step, checkpoint, files)
        except IntegrityError:
            if not await self.publishing.repair():
                raise
        return await self._publish_as(step, checkpoint, files)

    async def _publish_as(self, step: int, checkpoint: Checkpoint, files: Files) -> Published:
        version = self.publishing.version_for(step)
        self.versions.begin(version)
        source = FolderSource(checkpoint, files, self.staging)
        return await self.publishing.publish(version, checkpoint.layout(), source)


def _free(folders: Sequence[Path]) -> tuple[float, ...]:
    """Bytes free in each folder, or 0 if the folder is missing. Blocks."""
    found = []
    for folder in folders:
        try:
            found.append(disk.free_bytes(folder))
        except OSError:
            found.append(0.0)
    return tuple(found)


def _is_more(free: float, tried_with: float) -> bool:
    return free > tried_with + max(tried_with / _MORE, RECORDS_BYTES)


def _read_files(found: FoundCheckpoint[Checkpoint], marker: FolderMarkers) -> Files | None:
    """Return the small files, or None if the folder has changed since it was opened. The weights are read from the open
    files, so they belong to the same content. Blocks. Raises LocalError, and UsageError for a malformed schedule.
    """
    files = found.checkpoint.small_files()
    check_schedule(files)
    return files if fingerprint_of(found.step, found.path, marker) == found.fingerprint else None


def _digest(files: Files) -> str:
    whole = blake3()
    for path, contents in sorted(files.items()):
        if not path.endswith(_RECORDS):
            whole.update(f"{path!r} {blake3(contents).hexdigest()}\n".encode())
    return whole.hexdigest()[:32]


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (", ".join(paths[:_SHOWN]) or "no longer known which") + more


def _reason(path: Path, open_: Opening, error: P2PCastError) -> str:
    """Why a folder could not be published: the fault that opening it reports now, else ``error``. The watcher will use
    the same words, so that one fault is reported once.
    """
    try:
        open_(path)
    except P2PCastError as fault:
        return str(fault)
    return str(error)
