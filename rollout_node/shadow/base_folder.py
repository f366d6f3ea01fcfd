"""The checkpoint folder from which the run started, if this peer has it (``--base``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.layout import Layout
from p2pcast.ground.version import Version
from p2pcast.offline import state_digest

WholeVersions = Iterable[tuple[Version, tuple[bytes, int]]]
"""The run's versions, each with its layout's id and its state's digest."""


class BaseFolder:
    def __init__(self, checkpoint: Checkpoint, digest: int) -> None:
        self.checkpoint = checkpoint
        self.digest = digest
        """The digest of the folder's state."""

    @classmethod
    async def read(cls, folder: Path, blocking: Callable[..., Awaitable[Any]]) -> BaseFolder:
        """Open the folder and compute its digest. Raises LocalError, IntegrityError."""
        checkpoint: Checkpoint = await blocking(Checkpoint.open, folder)
        return cls(checkpoint, await blocking(state_digest, checkpoint, checkpoint.layout()))

    @property
    def layout(self) -> Layout:
        return self.checkpoint.layout()

    def small_files(self) -> dict[str, bytes]:
        """The folder's small files by path."""
        return self.checkpoint.small_files()

    def version_among(self, whole: WholeVersions) -> Version | None:
        """The newest of these versions whose state is the folder's; None if there is none."""
        own = self.layout.layout_id, self.digest
        return max((version for version, known in whole if known == own), default=None)
