"""Publishing: a checkpoint folder becomes a version, and goes out while it is still being encoded.

Promises: what is published decodes to exactly the folder's bytes (the hub stages its own artifact, as a peer does, before the next version starts); a folder that
goes bad half-way is aborted everywhere and nothing of it stays; a step that comes back unchanged is not published again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from p2pcast import limits
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.records import DELTA, Open, RunKey, run_id
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.cell import Encoded, encode
from p2pcast.codec.digest import MASK
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import LocalError, P2PCastError
from p2pcast.offline import state_digest
from p2pcast.parallel import cores, ordered_map
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.relay.node import Holding, Node
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.log import Log
from p2pcast.store.retention import ANCHOR_EVERY
from p2pcast.store.store import Store, Stored
from p2pcast.version import Version

logger = logging.getLogger("p2pcast.hub")

EMIT_S = 0.02
"""Pieces are vouched for this often: every peer checks a signature a batch, which costs as much as hashing a MiB."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is sealed. ``encode_s``: from the first cell to the last; sizes in bytes."""

    version: Version
    kind: str
    bytes: int
    dense_bytes: int
    changed: int
    params: int
    encode_s: float


class Publisher:
    """Turns folders into artifacts of ``node``. One version at a time."""

    def __init__(self, node: Node, store: Store, key: RunKey, staging: Staging, shadow_folder: Path, codec: str = "auto") -> None:
        self.node = node
        self.store = store
        self.shadow: Shadow | None = None
        self.head: Version | None = None
        """The newest version that is published."""
        self._key = key
        self._staging = staging
        self._folder = shadow_folder
        self._codec = codec
        self._since_anchor = 0

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
        if shadow is not None and shadow.version == newest and shadow.state_digest == manifest.state:
            self.shadow = shadow
            return
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

    def version_for(self, step: int) -> Version:
        """Where a folder ``step_<step>`` with new bytes goes: on, or into a new branch when the trainer has gone back."""
        head = self.head
        if head is None:
            return Version(0, step)
        return Version(head.branch, step) if step > head.step else Version(head.branch + 1, step)

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
        """Publish a folder as ``version``. Raises LocalError, IntegrityError; then the version was never sealed."""
        layout = checkpoint.layout()
        files = await self._staging.run(checkpoint.small_files)
        if self.shadow is None or self.shadow.layout != layout:
            return await self.publish_anchor(version, checkpoint, layout, files)
        published = await self._publish_delta(version, checkpoint, layout, files)
        self.head = version
        self._since_anchor += 1
        if self._since_anchor >= ANCHOR_EVERY:
            try:
                await self._write_anchor(version, layout, files, push=False)
            except LocalError as error:
                # The version is out; the next one tries again.
                logger.warning("no anchor of version %s: %s", version, error)
        return published

    async def publish_anchor(
        self, version: Version, checkpoint: Checkpoint, layout: Layout, files: dict[str, bytes]
    ) -> Published:
        """A whole state: the run's first, or the first of another layout."""
        started = asyncio.get_running_loop().time()
        if self.shadow is not None:
            self.shadow.close()
            self.shadow = None
        self.shadow = await self._staging.new_shadow(self._folder, layout, version, checkpoint.words, None)
        try:
            stored = await self._write_anchor(version, layout, files, push=True)
        except BaseException:
            # A delta against what was never published could be read by nobody.
            self.shadow.close()
            self.shadow = None
            raise
        self.head = version
        took = asyncio.get_running_loop().time() - started
        return Published(version, "anchor", stored.manifest.log, layout.nbytes, layout.params, layout.params, took)

    async def _write_anchor(self, version: Version, layout: Layout, files: dict[str, bytes], *, push: bool) -> Stored:
        shadow = self.shadow
        assert shadow is not None
        stored = await self._staging.run(
            self.store.write_anchor, self._key, secrets.token_bytes(16), version, layout, shadow.words, shadow.digests, files
        )
        self._since_anchor = 0
        self.node.add_stored(stored.assembly, self.store.open_log(stored), push=push)
        return stored

    async def _publish_delta(
        self, version: Version, checkpoint: Checkpoint, layout: Layout, files: dict[str, bytes]
    ) -> Published:
        shadow = self.shadow
        assert shadow is not None
        base = shadow.version
        record = Open(
            secrets.token_bytes(16), base, DELTA, layout.layout_id, limits.PIECE_BYTES, run_id(self._key.public), version
        )
        packer = Packer(self._key, record, layout)
        log = self.store.begin(record, layout)
        holding = self.node.open(packer.open_signed, None, log)
        loop = asyncio.get_running_loop()
        started = loop.time()
        staged = asyncio.ensure_future(self._staging.patch(holding, shadow))
        try:
            job = _Encoding(
                checkpoint, shadow, packer, log, self._codec, lambda b: loop.call_soon_threadsafe(self._emit, holding, b)
            )
            changed, growth = await self._staging.run(job.run)
            encode_s = loop.time() - started
            before = self.store.manifest(base)
            known = {} if before is None else {f.path: f.hash for f in before.files}
            await self._staging.run(_add_files, packer, log, files, known)
            *batches, manifest = packer.seal((shadow.state_digest + growth) & MASK)
            for signed in batches:
                self.node.add_local(holding, signed)
            await self._staging.run(self.store.keep_files, files)
            self.node.seal(holding, manifest)
            patch = await staged
        except BaseException:
            staged.cancel()
            await asyncio.wait([staged])
            self.node.abort(holding)
            raise
        # The next version's files are compared with this one's, and a shadow ahead of its store could not be explained to anybody.
        await holding.durable.wait()
        await self._staging.apply(shadow, patch)
        shadow.drop_patches(version)
        return Published(version, "delta", packer.log_bytes, layout.nbytes, changed, layout.params, encode_s)

    def _emit(self, holding: Holding, signed: bytes) -> None:
        if not holding.aborted:
            self.node.add_local(holding, signed)


def _mark(layout: bytes, state: int) -> str:
    return f"{layout.hex()} {state:016x}"


class _Encoding:
    """Encodes cell after cell on all cores and appends them to the log, in one thread of its own."""

    def __init__(
        self, checkpoint: Checkpoint, shadow: Shadow, packer: Packer, log: Log, codec: str, emit: Callable[[bytes], Any]
    ) -> None:
        self._checkpoint = checkpoint
        self._shadow = shadow
        self._packer = packer
        self._log = log
        self._codec = codec
        self._emit = emit

    def run(self) -> tuple[int, int]:
        """(words changed, growth of the state's digest)."""
        changed = growth = 0
        packer, emitted = self._packer, time.monotonic()
        for coded in ordered_map(self._encode, self._shadow.layout.cells, workers=cores(), name="encode"):
            if coded is None:
                continue
            self._log.write(packer.log_bytes, [coded.payload])
            packer.add_cell(coded.cell, coded.codec, coded.payload, coded.before, coded.after)
            changed += coded.changed
            growth += coded.after - coded.before
            if time.monotonic() - emitted > EMIT_S:
                while (batch := packer.take_batch()) is not None:
                    self._emit(batch)
                emitted = time.monotonic()
        return changed, growth

    def _encode(self, cell: Cell) -> Encoded | None:
        old, new = self._shadow.words(cell), self._checkpoint.words(cell)
        return encode(cell, old, new, before=self._shadow.mark(cell.index), codec=self._codec)


def _add_files(packer: Packer, log: Log, files: dict[str, bytes], known: dict[str, bytes]) -> None:
    for path, contents in sorted(files.items()):
        name = blake3.blake3(contents).digest()
        if known.get(path) == name:
            packer.add_file(path, None, len(contents), name)
        else:
            if contents:
                log.write(packer.log_bytes, [contents])
            packer.add_file(path, contents, len(contents), name)
