"""Publishing: a checkpoint folder, or what a trainer's ranks bring, becomes a version, and goes out while it is still being encoded.

Promises: what is published decodes to exactly the folder's bytes (the hub stages its own artifact, as a peer does, before the next version starts); a version that
goes bad half-way is aborted everywhere and nothing of it stays; a step that comes back unchanged in a folder is not published again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from p2pcast.artifact.packer import Packer
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.records import DELTA, OWN, Open, run_id
from p2pcast.artifact.run_key import RunKey
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.choice import Choice
from p2pcast.codec.digest import MASK
from p2pcast.codec.join import assemble
from p2pcast.codec.layout import Layout
from p2pcast.codec.warm import warm_up_for
from p2pcast.errors import IntegrityError, P2PCastError
from p2pcast.offline import state_digest
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.state.replay import heal, replay_to
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.store import Store, Stored
from p2pcast.version import Version
from topology.sizes import Sizes
from trainer_node.choosing import Choosing
from trainer_node.packing import Incoming, Packing, each, encode_folder, join_incoming
from trainer_node.version_numbers import VersionNumbers

logger = logging.getLogger("p2pcast.hub")


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is sealed. ``encode_s``: from the first cell to the last; sizes in bytes. ``choice``: its codec; None for a whole state."""

    version: Version
    kind: str
    bytes: int
    dense_bytes: int
    changed: int
    params: int
    encode_s: float
    choice: Choice | None = None


class HealedError(IntegrityError):
    """The hub's own state was damaged, and has been repaired."""


class Publishing:
    """Turns folders and what ranks bring into artifacts of ``node``. One version at a time: who publishes holds ``turn``."""

    def __init__(
        self, node: Node, store: Store, key: RunKey, staging: Staging, shadow_folder: Path, choosing: Choosing, sizes: Sizes,
        numbers: VersionNumbers,
    ) -> None:  # fmt: skip
        self.node = node
        self.store = store
        self.shadow: Shadow | None = None
        self.head: Version | None = None
        """The newest version that is published."""
        self.turn = asyncio.Lock()
        self._key = key
        self._staging = staging
        self._folder = shadow_folder
        self._choosing = choosing
        self._sizes = sizes
        self._numbers = numbers
        self.reading = asyncio.Lock()
        """Held while somebody reads the shadow beside live traffic: until then no other takes its place."""

    async def restore(self) -> None:
        """Take up where an earlier process stopped."""
        await self._restore()
        self.head = None if self.shadow is None else self.shadow.version

    async def _restore(self) -> None:
        """The shadow of an earlier process, or the store's newest anchor and the deltas from there."""
        newest = self.store.newest()
        if newest is None:
            return
        manifest = self.store.manifest(newest)
        layout = next(s.assembly.layout for s in self.store.artifacts.values() if s.version == newest)
        assert manifest is not None
        try:
            shadow = await self._staging.run(Shadow.open, self._folder, layout)
        except P2PCastError:
            shadow = None
        if shadow is not None:
            self._numbers.seen(shadow.version)
        if shadow is not None and shadow.version == newest and shadow.state_digest == manifest.state:
            rotten = await self._staging.run(shadow.verify, self._staging.workers)
            if not rotten or await self._healed(shadow):
                self.shadow = shadow
                return
            shadow.close()
            shadow = None
        held = None
        if shadow is not None:
            known = self.store.manifest(shadow.version)
            held = shadow.version if known is not None and known.state == shadow.state_digest else None
        self.shadow = await self._rebuild(shadow, held)

    async def _rebuild(self, shadow: Shadow | None, held: Version | None) -> Shadow | None:
        stored = self.store.artifacts
        for edge in cheapest_path(held, [Edge(s.id, s.base, s.version, s.manifest.log) for s in stored.values()]):
            holding = self.node.holdings[edge.artifact]
            if edge.base is None:
                if shadow is not None:
                    shadow.close()
                shadow = await self._staging.fill(holding, self._folder)
            else:
                assert shadow is not None
                await self._staging.apply(shadow, await self._staging.patch(holding, shadow))
                shadow.drop_patches(edge.version)
        return shadow

    def version_for(self, step: int, *, resume: bool = False) -> Version:
        """Where new bytes of a step go: on, or into a new branch when the trainer has gone back, or says that it resumes."""
        return self._numbers.next(self.head, step, resume=resume)

    def reserve(self) -> None:
        """Reserve numbers ahead of the newest version, while no version waits. Blocks. Raises LocalError."""
        if self.head is not None:
            self._numbers.reserve(self.head)

    async def base_for(self, layout: Layout) -> Version | None:
        """What a version of this layout is coded against; None: it begins with a whole state."""
        if self.shadow is None and self.head is not None:
            # A whole state that came to nothing has taken the shadow's place.
            await self._restore()
        return self.shadow.version if self.shadow is not None and self.shadow.layout == layout else None

    def mark_of(self, version: Version) -> str | None:
        """Layout and digest of a version that is still kept, as text to be remembered."""
        manifest = self.store.manifest(version)
        return None if manifest is None else _mark(manifest.layout, manifest.state)

    async def unchanged(self, step: int, checkpoint: Checkpoint, remembered: str | None = None) -> Version | None:
        """The newest version of this step, if it has exactly these weights. ``remembered``: its mark, for when retention has removed it."""
        newest = max((s.version for s in self.store.artifacts.values() if s.version.step == step), default=None)
        mark = remembered if newest is None else self.mark_of(newest)
        layout = checkpoint.layout()
        if mark is None or not mark.startswith(layout.layout_id.hex()):
            return None
        state = await self._staging.run(state_digest, checkpoint, layout)
        return (newest or Version(0, step)) if _mark(layout.layout_id, state) == mark else None

    async def publish(self, version: Version, checkpoint: Checkpoint) -> Published:
        """Publish a folder as ``version``. Raises LocalError, IntegrityError; then the version was never sealed, and its number is used. HealedError: to be tried again
        under another number."""
        layout = checkpoint.layout()
        files = await self._staging.run(checkpoint.small_files)
        if self.shadow is None or self.shadow.layout != layout:
            return await self.publish_anchor(version, checkpoint, layout, files)
        shadow, choice = self.shadow, self.choice_for(layout)

        async def made(packing: Packing) -> dict[str, bytes] | None:
            await self._staging.run(encode_folder, checkpoint, shadow, packing, choice)
            return files

        try:
            return await self._publish_delta(version, shadow, choice, made)
        except IntegrityError as error:
            if await self._healed(shadow):
                raise HealedError(f"version {version}: {error}") from None
            raise

    def choice_for(self, layout: Layout) -> Choice:
        """What the next version of this layout goes out in."""
        return self._choosing.next(layout)

    async def receive(self, version: Version, layout: Layout, incoming: Incoming, choice: Choice) -> Published:
        """Publish what ranks bring as ``version``: changes against ``base_for(layout)``, in the codec that ranks were told, or a whole state. Where no small
        files come, they stay as they are.

        Raises what ``incoming`` ended with, and as ``publish`` does; then the version was never sealed.
        """
        before, shadow = self.head, self.shadow
        if shadow is not None and shadow.layout == layout:

            async def made(packing: Packing) -> dict[str, bytes] | None:
                await join_incoming(incoming, shadow, packing, choice, self._staging)
                return incoming.files

            return await self._publish_delta(version, shadow, choice, made)

        async def filled() -> tuple[Shadow, dict[str, bytes]]:
            shadow = await self._staging.run(self._empty_shadow, layout)
            try:
                with shadow.filling(version) as put:
                    await each(incoming, lambda c: put(c.cell, assemble(c.cell, c.parts)), lambda row, idle: None, self._staging)
                if incoming.files is not None or before is None:
                    return shadow, incoming.files or {}
                return shadow, await self._staging.run(self.store.small_files, before)
            except BaseException:
                shadow.close()
                raise

        return await self._publish_anchor(version, layout, filled)

    async def publish_anchor(
        self, version: Version, checkpoint: Checkpoint, layout: Layout, files: dict[str, bytes]
    ) -> Published:
        """A whole state from a folder: the run's first, or the first of another layout."""

        async def filled() -> tuple[Shadow, dict[str, bytes]]:
            return await self._staging.new_shadow(self._folder, layout, version, checkpoint.lent, None), files

        return await self._publish_anchor(version, layout, filled)

    async def _publish_anchor(
        self, version: Version, layout: Layout, filled: Callable[[], Awaitable[tuple[Shadow, dict[str, bytes]]]]
    ) -> Published:
        """``filled``: the new shadow, at ``version``, and the version's small files. Nobody hears of the version before the store holds it, which is note enough of its number."""
        started = asyncio.get_running_loop().time()
        async with self.reading:
            if self.shadow is not None:
                self.shadow.close()
                self.shadow = None
            self.shadow, files = await filled()
        try:
            stored = await self._write_anchor(version, layout, files)
        except BaseException:
            # A delta against what was never published could be read by nobody.
            self.shadow.close()
            self.shadow = None
            raise
        self.head = version
        took = asyncio.get_running_loop().time() - started
        return Published(version, "anchor", stored.manifest.log, layout.nbytes, layout.params, layout.params, took)

    def _empty_shadow(self, layout: Layout) -> Shadow:
        warm_up_for(layout)
        return Shadow.create(self._folder, layout)

    async def _healed(self, shadow: Shadow) -> bool:
        """Whether cells had rotted, and all of them are right again, from what lies on disk."""
        rotten = await self._staging.run(shadow.verify, self._staging.workers)
        if not rotten:
            return False
        logger.error("%d cells of the shadow have rotted", len(rotten))
        replay = replay_to(shadow.version, [h for h in self.node.holdings.values() if h.finished])
        if replay is None:
            return False
        if left := await self._staging.run(heal, shadow, rotten, replay):
            logger.error("%d of them could not be put right: %s", len(left), left[0][1])
            return False
        logger.warning("%d cells of the shadow were put right from what lies on disk", len(rotten))
        return True

    async def _write_anchor(self, version: Version, layout: Layout, files: dict[str, bytes]) -> Stored:
        shadow = self.shadow
        assert shadow is not None
        stored = await self._staging.run(
            self.store.write_anchor, self._key, secrets.token_bytes(16), version, layout, shadow.words, shadow.digests, files, OWN
        )
        self.node.add_stored(stored.assembly, self.store.open_log(stored), push=True)
        return stored

    async def _publish_delta(
        self, version: Version, shadow: Shadow, choice: Choice, made: Callable[[Packing], Awaitable[dict[str, bytes] | None]]
    ) -> Published:
        """``made`` adds all cells, and gives the version's small files; None: those of the base stay."""
        base, layout = shadow.version, shadow.layout
        piece = piece_bytes(self._sizes.bytes)
        base_hash = self.store.identity(base)
        record = Open(secrets.token_bytes(16), base, DELTA, layout.layout_id, piece, run_id(self._key.public), version, base_hash)
        await self._staging.run(self._numbers.note, version)
        packer = Packer(self._key, record, layout)
        log = self.store.begin(record, layout)
        holding = self.node.open(packer.open_signed, None, log)
        loop = asyncio.get_running_loop()
        holding.proof = loop.create_future()
        started = loop.time()
        packing = Packing(packer, log, lambda batch: loop.call_soon_threadsafe(self._emit, holding, batch))
        staged = asyncio.ensure_future(self._staging.patch(holding, shadow))
        making = asyncio.ensure_future(made(packing))
        try:
            await asyncio.wait([making, staged], return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                # Staging ends before there is a seal only when it fails.
                staged.result()
            files = making.result()
            encode_s = loop.time() - started
            before = self.store.manifest(base)
            known = () if before is None else before.files
            if files is None:
                packing.repeat_files(known)
            else:
                await self._staging.run(packing.add_files, files, {f.path: f.hash for f in known})
            *batches, manifest = packer.seal((shadow.state_digest + packing.growth) & MASK, version_hash=OWN)
            for signed in batches:
                self.node.add_local(holding, signed)
            if files is not None:
                await self._staging.run(self.store.keep_files, files)
            self.node.seal(holding, manifest)
            patch = await staged
            holding.proof.set_result(True)
        except BaseException:
            holding.proof.set_result(False)
            packing.stop()
            making.cancel()
            staged.cancel()
            await asyncio.wait([making, staged])
            for task in (making, staged):
                if not task.cancelled():
                    task.exception()
            self.node.abort(holding)
            raise
        # The next version's files are compared with this one's, and a shadow ahead of its store could not be explained to anybody.
        await holding.until_durable()
        if self._choosing.went_out(choice.codec, packing.payload_bytes, layout.nbytes):
            await self._staging.run(self._choosing.learn, shadow, patch)
        await self._staging.apply(shadow, patch)
        shadow.drop_patches(version)
        self.head = version
        return Published(version, "delta", packer.log_bytes, layout.nbytes, packing.changed, layout.params, encode_s, choice)

    def _emit(self, holding: Holding, signed: bytes) -> None:
        if not holding.aborted:
            self.node.add_local(holding, signed)


def _mark(layout: bytes, state: int) -> str:
    return f"{layout.hex()} {state:016x}"
