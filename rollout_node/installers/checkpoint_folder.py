"""``safetensors:DIR``: every version as an ordinary Hugging Face folder, for programs that read weights from disk.

Staging writes the folder under a hidden name; committing renames twice. ``rollout_node.installers.step_folders``
describes the layout of DIR. A check detects within a second that a folder was removed or holds a different version; an
audit detects changed bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from p2pcast.checkpoint.folder_form import DEFAULT, FolderForm
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import LocalError, P2PCastError
from p2pcast.ground.plain_text import decodable
from p2pcast.ground.version import Version
from rollout_node.installers.installer import Abilities, Audit, CommitReport
from rollout_node.installers.step_folders import StepFolders

SmallFiles = Callable[[Version], Mapping[str, bytes]]
"""Returns the small files that belong to a version: path → contents."""

T = TypeVar("T")


class FolderInstaller:
    """Keeps the newest ``keep`` versions in ``folder``. ``ready`` becomes True after this process's first commit."""

    def __init__(
        self, folder: Path, files: SmallFiles, *, keep: int, form: FolderForm = DEFAULT, name: str | None = None
    ) -> None:
        self.name = name or decodable(f"safetensors:{folder}")
        self._folders = StepFolders(folder, keep, form)
        self._files = files
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="folder")
        self.abilities = Abilities()
        self.committed: Version | None = None
        self.ready = False
        self._closed = False

    @property
    def commit_needs_shadow(self) -> bool:
        return False

    async def start(self) -> None:
        """Prepare and lock the folder. Raises LocalError if it cannot be used."""
        await self._run(self._folders.start)

    async def check(self) -> None:
        committed = self.committed
        if committed is not None and not await self._run(lambda: self._folders.holds(committed)):
            self.committed, self.ready = None, False

    async def stage(self, version: Version, shadow: Path) -> None:
        cancelled = threading.Event()
        try:
            await self._run(lambda: self._folders.stage(version, shadow, self._files(version), cancelled))
        except BaseException:
            cancelled.set()
            self.ready = False
            raise

    async def commit(self, version: Version) -> CommitReport:
        """Publish the staged folder. ``pause_s`` is 0, because readers decide when to load it."""
        try:
            path = await self.publish(version)
            await self.settle(version)
        except P2PCastError:
            self.ready = False
            raise
        return CommitReport(0.0, detail={"folder": str(path)})

    async def publish(self, version: Version) -> Path:
        """First half of ``commit``: give the staged version its name."""
        return await self._run(lambda: self._folders.publish(version))

    async def settle(self, version: Version) -> None:
        """Second half of ``commit``: point ``latest`` at the version, and remove old versions."""

        def work() -> None:
            self._folders.settle(version)
            # Set on this thread: the caller may have been cancelled meanwhile.
            self.committed, self.ready = version, True

        await self._run(work)

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        """Read the installed checkpoint back, on all cores, and compare it with the digests."""
        version = self.committed
        if version is None:
            raise LocalError(f"{self.name}: no version is in use here, so there is nothing to audit")
        wrong = await self._run(lambda: self._folders.differing(version, layout, digests))
        if wrong:
            self.committed, self.ready = None, False
        return Audit(version, wrong, [])

    async def close(self) -> None:
        """Discard the staged version. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            await self._run(self._folders.close)
            self._pool.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
