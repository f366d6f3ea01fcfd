"""From a folder of checkpoints to versions: complete ones are published in turn.

Promises: what is wrong with a folder costs that version alone, and is told; a folder that was published is not published again, nor are the same weights under the
same step.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Protocol

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.errors import LocalError, P2PCastError
from p2pcast.state.staging import Staging
from p2pcast.version import Version
from trainer_node.past import Past
from trainer_node.publishing import HealedError, Published, Publishing
from trainer_node.watcher import Damaged, Found, check_checkpoint, watch

logger = logging.getLogger("p2pcast.hub")


class FoldersOwner(Protocol):
    async def until_near(self) -> None:
        """Returns once the next version may begin."""
        ...

    def begins(self, version: Version) -> None: ...

    async def went_out(self, done: Published) -> None: ...

    def skip(self, name: str, why: str) -> None: ...

    def not_skipped(self, name: str) -> None: ...

    def broken(self) -> bool:
        """The hub's own disk has failed: nothing more can be published."""
        ...


class Folders:
    def __init__(self, owner: FoldersOwner, publishing: Publishing, past: Past, staging: Staging) -> None:
        self._owner = owner
        self._publishing = publishing
        self._past = past
        self._staging = staging

    async def run(self, checkpoints: Path) -> None:
        """Until cancelled. Raises LocalError when the hub's own disk fails."""
        async with contextlib.aclosing(watch(checkpoints)) as events:
            async for event in events:
                if isinstance(event, Damaged):
                    self._owner.skip(event.path.name, event.reason)
                elif self._past[event.step].folder != event.fingerprint:
                    await self._take(event)

    async def _take(self, found: Found) -> None:
        owner = self._owner
        try:
            async with self._publishing.turn:
                await owner.until_near()
                await self._publish(found)
        except P2PCastError as error:
            if not found.path.exists():
                owner.skip(found.path.name, "it was deleted while it was read")
            elif isinstance(error, LocalError) and owner.broken():
                raise
            else:
                owner.skip(found.path.name, await self._staging.run(_why, found.path, error))

    async def _first(self, step: int, checkpoint: Checkpoint) -> Published:
        """Publish new weights; once more, under another number, where the hub's own state had to be healed first."""
        healed = False
        while True:
            version = self._publishing.version_for(step)
            self._owner.begins(version)
            try:
                return await self._publishing.publish(version, checkpoint)
            except HealedError:
                if healed:
                    raise
                healed = True

    async def _publish(self, found: Found) -> None:
        owner, publishing = self._owner, self._publishing
        checkpoint = await self._staging.run(Checkpoint.open, found.path)
        same = await publishing.unchanged(found.step, checkpoint, self._past[found.step].mark)
        mark = None
        if same is not None:
            logger.info("%s has the weights of version %s: nothing to publish", found.path.name, same)
        else:
            done = await self._first(found.step, checkpoint)
            for path, why in checkpoint.skipped:
                logger.info("%s/%s does not travel: %s", found.path.name, path, why)
            await owner.went_out(done)
            mark = publishing.mark_of(done.version)
        owner.not_skipped(found.path.name)
        await self._staging.run(self._past.note, found.step, folder=found.fingerprint, mark=mark)


def _why(path: Path, error: P2PCastError) -> str:
    """Why a folder could not be published. What is wrong with it by now comes first, in the words that the watcher finds for it: so it is said once."""
    try:
        check_checkpoint(path)
    except P2PCastError as found:
        return str(found)
    return str(error)
