"""How the hub shows its versions in /status, /wait and metrics. Read-only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.daemon.http_server import Document
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import FILE
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore
from trainer_node import hub_metrics
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.publish.checkpoint_watcher import fingerprint_of, same_fingerprint
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.version_lifecycle import VersionLifecycle


@dataclass(eq=False, repr=False)
class VersionView:
    publishing: Pipeline
    lifecycle: VersionLifecycle
    store: ArtifactStore
    progress: BroadcastProgress

    @property
    def head(self) -> str | None:
        head = self.publishing.head
        return None if head is None else str(head)

    @property
    def skipped(self) -> Mapping[str, str]:
        return self.lifecycle.skipped

    def status(self) -> Document:
        shadow, stored = self.publishing.shadow, self.store.artifacts.values()
        return {
            "layout_id": None if shadow is None else shadow.layout.layout_id.hex(),
            "digests": {str(s.version): f"{s.manifest.state:016x}" for s in stored},
            "artifacts": [
                {
                    "version": str(s.version),
                    "base": None if s.base is None else str(s.base),
                    "kind": s.kind,
                    "bytes": s.manifest.log,
                }
                for s in sorted(stored, key=lambda s: (s.version, s.kind))
            ],
            "last": self._last(),
            "skipped": self.skipped,
        }

    def manifests(self) -> Document:
        """Version → hash of its signed manifest, for the stored versions."""
        stored = self.store.artifacts.values()
        known = {s.version: identity for s in stored if (identity := s.manifest.identity) is not None}
        return {str(version): identity.hex() for version, identity in sorted(known.items())}

    def files(self) -> Document:
        """Version → path → BLAKE3 of each small file, for the stored versions."""
        stored = {s.version: s.manifest for s in self.store.artifacts.values()}
        found = {str(v): {f.path: f.hash.hex() for f in m.files} for v, m in sorted(stored.items())}
        return {"files": found}

    def schedules(self) -> Document:
        """Version → BLAKE3 of its sparse-attention schedule, for the stored versions that have one."""
        return {str(version): name.hex() for version, name in sorted(self.store.hashes_of(FILE).items())}

    def _last(self) -> Document | None:
        done, last_s = self.lifecycle.published, self.progress.time_to_last_s
        if done is None:
            return None
        return {
            "version": str(done.version),
            "kind": done.kind,
            "bytes": done.bytes,
            "dense_bytes": done.dense_bytes,
            "changed": done.changed,
            "params": done.params,
            "encode_s": round(done.encode_s, 4),
            "codec": None if done.choice is None else done.choice.codec,
            "codec_why": None if done.choice is None else done.choice.why,
            "time_to_last_s": None if last_s is None else round(last_s, 4),
        }

    def published(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        """For /wait: return whether the store has ``version`` or a newer one, and the newest version."""
        newest = self.store.newest()
        return newest is not None and newest >= version, {"newest": None if newest is None else str(newest)}

    def families(self) -> Iterable[Metric]:
        """Metrics of the newest version; without samples until there is one."""
        done, last_s = self.lifecycle.published, self.progress.time_to_last_s
        yield hub_metrics.VERSION_STEP(None if done is None else done.version.step)
        yield hub_metrics.DELTA_BYTES(None if done is None else done.bytes)
        yield hub_metrics.DELTA_RATIO(None if done is None else done.dense_bytes / max(1, done.bytes))
        yield hub_metrics.ENCODE_SECONDS(None if done is None else done.encode_s)
        yield hub_metrics.TIME_TO_LAST(last_s)


@dataclass(frozen=True, slots=True)
class FolderVersions:
    """Finds the version that a step folder's current content was published as, for programs that have just written one.

    A step is not enough: a restarted trainer counts from its first step, which the hub already has from before.
    ``checkpoints`` is None for a hub without a folder of checkpoints.
    before. ``checkpoints``: None for a hub without a folder of checkpoints.
    """

    checkpoints: Path | None
    form: FolderForm
    history: PublishHistory
    store: ArtifactStore
    staging: Staging

    async def version_of(self, name: str) -> Version | None:
        """Return the version, or None until the hub has published the folder's current content. Raises UsageError."""
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
