"""Publishes versions, one at a time: a delta against the hub's shadow, or a whole state if there is no base.

Guarantees:

- A published version decodes to exactly the bytes of its source.
- A version that fails half-way leaves nothing behind.
- A step whose weights have not changed is recognised.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import OWN, Manifest
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.layout import Layout
from p2pcast.files.atomic_files import is_full
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.offline import state_digest
from p2pcast.relay.node import Node
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore
from topology.version_sizes import room_for_next
from trainer_node.publish.codec_choice import CodecChoice
from trainer_node.publish.delta_publisher import DeltaPublisher
from trainer_node.publish.hub_shadow import HubShadow
from trainer_node.publish.published import Published
from trainer_node.publish.version_numbers import VersionNumbers
from trainer_node.publish.version_source import Files, VersionSource


@dataclass(eq=False, repr=False)
class Pipeline:
    """A publisher holds ``turn`` from ``version_for`` until ``publish`` returns. ``make_room`` frees the given number
    of bytes in the store, if it can.
    """

    node: Node
    store: ArtifactStore
    key: RunKey
    staging: Staging
    hub_shadow: HubShadow
    deltas: DeltaPublisher
    choosing: CodecChoice
    numbers: VersionNumbers
    make_room: Callable[[float], Awaitable[None]]
    head: Version | None = field(init=False, default=None)
    """The newest published version."""
    turn: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    @property
    def shadow(self) -> Shadow | None:
        return self.hub_shadow.shadow

    @property
    def used(self) -> Version | None:
        """The highest version number that this run has used, as far as the hub knows."""
        return self.numbers.used

    @property
    def layouts(self) -> Mapping[bytes, Layout]:
        """The layouts that the hub knows, by id."""
        return self.node.layouts

    def head_manifest(self) -> Manifest | None:
        return None if self.head is None else self.store.manifest(self.head)

    async def restore(self) -> None:
        """Continue where an earlier process stopped."""
        await self.hub_shadow.restore()
        self.head = None if self.shadow is None else self.shadow.version

    async def catch_up(self) -> None:
        """Bring the shadow to the newest version, in case artifacts that it needed are available again."""
        async with self.turn:
            if self.shadow is None or self.shadow.version != self.store.newest():
                async with self.hub_shadow.reading:
                    self.hub_shadow.close()
                    await self.restore()

    def version_for(self, step: int, *, resume: bool = False) -> Version:
        """Return the version number for new bytes of ``step``: the next of its branch, or the first of a new branch if
        the trainer has gone back or declares that it resumes.
        """
        return self.numbers.next(self.head, step, resume=resume)

    def reserve(self) -> None:
        """Reserve numbers ahead of the newest version. Blocks. Raises LocalError."""
        if self.head is not None:
            self.numbers.reserve(self.head)

    async def base_for(self, layout: Layout) -> Version | None:
        """Return the base of the next version with this layout, or None if that version will be a whole state."""
        if self.shadow is None and self.head is not None:
            # Publishing an anchor failed and closed the shadow.
            await self.hub_shadow.restore()
        return self.shadow.version if self.shadow is not None and self.shadow.layout == layout else None

    def choice_for(self, layout: Layout) -> Choice:
        """Choose the codec of the next version with this layout."""
        return self.choosing.next(layout)

    def mark_of(self, version: Version) -> str | None:
        """The layout and state digest of a stored version, as text, or None if it is not stored."""
        manifest = self.store.manifest(version)
        return None if manifest is None else _mark(manifest.layout, manifest.state)

    async def unchanged(self, step: int, checkpoint: Checkpoint, remembered: str | None = None) -> Version | None:
        """Return the newest version of this step if it has exactly these weights, whatever its small files.
        ``remembered``: the version's mark, in case retention has removed the version.
        """
        newest = max((s.version for s in self.store.artifacts.values() if s.version.step == step), default=None)
        mark = remembered if newest is None else self.mark_of(newest)
        layout = checkpoint.layout()
        if mark is None or not mark.startswith(layout.layout_id.hex()):
            return None
        state = await self.staging.run(state_digest, checkpoint, layout)
        return (newest or Version(0, step)) if _mark(layout.layout_id, state) == mark else None

    def other_files(self, version: Version, files: Files) -> list[str]:
        """Paths where ``files`` differ from a stored version's small files, sorted; empty if it is not stored."""
        manifest = self.store.manifest(version)
        if manifest is None:
            return []
        held = {file.path: file.hash for file in manifest.files}
        new = {path: blake3(contents).digest() for path, contents in files.items()}
        return sorted(path for path in held.keys() | new.keys() if held.get(path) != new.get(path))

    async def publish(
        self, version: Version, layout: Layout, source: VersionSource, choice: Choice | None = None
    ) -> Published:
        """Publish a version and wait until it is durable. ``choice``: the codec of a delta, if it was chosen earlier.

        Raises LocalError, IntegrityError, and whatever ``source`` raises. The version is then not sealed, and its
        number is used up.
        """
        shadow = self.shadow
        try:
            if shadow is None or shadow.layout != layout:
                await self.make_room(layout.nbytes)
                return await self._publish_anchor(version, layout, source)
            await self.make_room(room_for_next(self.store.deltas()))
            return await self._publish_delta(version, shadow, source, choice or self.choice_for(layout))
        except LocalError as error:
            if is_full(error):
                await self.make_room(layout.nbytes)
            raise

    async def repair(self) -> bool:
        """Repair the shadow. Returns whether it had corrupt cells and is now repaired: the delta may be retried."""
        return await self.hub_shadow.repair()

    def base_files(self, replaced: Collection[str] = ()) -> Files:
        """Small files of the newest version, except the paths in ``replaced``, which the next version brings itself.
        Blocks. Raises LocalError, also if any other file is missing.
        """
        return {} if self.head is None else self.store.all_files(self.head, but=replaced)

    async def _publish_delta(
        self, version: Version, shadow: Shadow, source: VersionSource, choice: Choice
    ) -> Published:
        delta = await self.deltas.publish(version, shadow, choice, source)
        if self.choosing.is_lesson(choice.codec, delta.payload_bytes, shadow.layout.nbytes):
            await self.staging.run(self.choosing.learn, shadow, delta.patch)
        await self.staging.apply(shadow, delta.patch)
        shadow.drop_patches(version)
        self.head = version
        return delta.published

    async def _publish_anchor(self, version: Version, layout: Layout, source: VersionSource) -> Published:
        """Publish a whole state. The number is not noted first: peers learn of the version only once it is stored."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        files = await self.hub_shadow.replace(lambda: source.fill(self.hub_shadow.folder, layout, version))
        shadow = self.shadow
        assert shadow is not None
        try:
            stored = await self.staging.run(
                self.store.write_anchor, self.key, secrets.token_bytes(16), version, layout, shadow.words,
                shadow.digests, files, OWN,
            )  # fmt: skip
            self.node.add_stored(stored.assembly, self.store.open_log(stored), push=True)
        except BaseException:
            # No peer could decode a delta against a version that was never published.
            self.hub_shadow.close()
            raise
        self.head = version
        size, params = stored.manifest.log, layout.params
        return Published(version, "anchor", size, layout.nbytes, params, params, loop.time() - began)


def _mark(layout: bytes, state: int) -> str:
    return f"{layout.hex()} {state:016x}"
