"""The version that a step folder's present content was published as, for programs that have just written one.

A step alone does not tell: a trainer that starts again counts from its first step, and the hub has that step from
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import Store
from trainer_node.publish.checkpoint_watcher import fingerprint_of, same_fingerprint
from trainer_node.publish.publish_history import PublishHistory


@dataclass(frozen=True, slots=True)
class FolderVersions:
    """``checkpoints``: None for a hub without a folder of checkpoints."""

    checkpoints: Path | None
    form: FolderForm
    history: PublishHistory
    store: Store
    staging: Staging

    async def version_of(self, name: str) -> Version | None:
        """None while the hub has not published what the folder holds now. Raises UsageError."""
        step = self.form.names.step_of(name)
        if self.checkpoints is None:
            raise UsageError("this hub has no folder of checkpoints: wait for a version or a step")
        if step is None:
            raise UsageError(f"folder={name[:80]!r} does not match --step-names {self.form.names}")
        found = await self.staging.run(fingerprint_of, step, self.checkpoints / name, self.form.marker)
        known = self.history[step]
        if found is None or not same_fingerprint(known.folder, found):
            return None
        # Earlier releases did not record the version.
        return known.version or max((v for v in self.store.versions() if v.step == step), default=None)
