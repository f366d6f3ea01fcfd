"""Publishes one delta, from its OPEN to its durable seal. Cells are sent while later ones are being encoded.

Guarantees:

- The hub decodes its own delta, as a peer does, before the delta counts as published.
- A delta that fails half-way is aborted at every peer, and its number is never reused.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast.artifact.packer import Packer
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, OWN, Open, run_id
from p2pcast.codec.codec_prediction import Choice
from p2pcast.codec.digest import MASK
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.artifact_store import ArtifactStore
from topology.version_sizes import VersionSizes
from trainer_node.publish.delta_builder import DeltaBuilder
from trainer_node.publish.published import Published
from trainer_node.publish.version_numbers import VersionNumbers
from trainer_node.publish.version_source import Files, VersionSource


@dataclass(frozen=True, slots=True)
class Delta:
    """A durable delta. ``patch``: the decoded delta, to apply to the shadow."""

    published: Published
    patch: Path
    payload_bytes: int


class DeltaPublisher:
    """``sizes``: sizes of the run's versions, which determine the piece size."""

    def __init__(
        self,
        node: Node,
        store: ArtifactStore,
        key: RunKey,
        staging: Staging,
        sizes: VersionSizes,
        numbers: VersionNumbers,
    ) -> None:
        self._node = node
        self._store = store
        self._key = key
        self._staging = staging
        self._sizes = sizes
        self._numbers = numbers

    async def publish(self, version: Version, shadow: Shadow, choice: Choice, source: VersionSource) -> Delta:
        """Publish a delta; return once it is durable. Raises LocalError, IntegrityError, and what ``source`` raises."""
        await self._staging.run(self._numbers.note, version)
        record, layout = self._open_record(version, shadow), shadow.layout
        packer = Packer(self._key, record, layout)
        log = self._store.begin(record, layout)
        holding = self._node.open(packer.open_signed, None, log)
        loop = asyncio.get_running_loop()
        holding.require_proof()
        began = loop.time()
        builder = DeltaBuilder(packer, log, lambda batch: loop.call_soon_threadsafe(self._emit, holding, batch))
        staged = asyncio.ensure_future(self._staging.patch(holding, shadow))
        encoding = asyncio.ensure_future(source.encode(shadow, builder, choice))
        try:
            await asyncio.wait([encoding, staged], return_when=asyncio.FIRST_COMPLETED)
            if not encoding.done():
                # Staging finishes before the seal only with an error.
                staged.result()
            files = encoding.result()
            encode_s = loop.time() - began
            await self._seal(holding, packer, builder, shadow, files)
            patch = await staged
            holding.prove(good=True)
        except BaseException:
            holding.prove(good=False)
            builder.stop()
            await _cancelled(encoding, staged)
            self._node.abort(holding)
            raise
        # Wait for the store: the next version's files are compared with this one's, and a shadow that is ahead of its
        # store could not be rebuilt.
        await holding.until_durable()
        published = Published(
            version, "delta", packer.log_bytes, layout.nbytes, builder.changed, layout.params, encode_s, choice
        )
        return Delta(published, patch, builder.payload_bytes)

    def _open_record(self, version: Version, shadow: Shadow) -> Open:
        artifact, run = secrets.token_bytes(16), run_id(self._key.public)
        piece = piece_bytes(self._sizes.bytes, self._sizes.hops, self._sizes.slowest_bps)
        base, layout = shadow.version, shadow.layout.layout_id
        return Open(artifact, base, DELTA, layout, piece, run, version, self._store.identity(base))

    async def _seal(
        self, holding: Holding, packer: Packer, builder: DeltaBuilder, shadow: Shadow, files: Files | None
    ) -> None:
        """Add the small files and the manifest. If ``files`` is None, the base's files stay."""
        before = self._store.manifest(shadow.version)
        known = () if before is None else before.files
        if files is None:
            builder.repeat_files(known)
        else:
            await self._staging.run(builder.add_files, files, {f.path: f.hash for f in known})
        *batches, manifest = packer.seal((shadow.state_digest + builder.growth) & MASK, version_hash=OWN)
        for signed in batches:
            self._node.add_local(holding, signed)
        if files is not None:
            await self._staging.run(self._store.keep_files, files)
        self._node.seal(holding, manifest)

    def _emit(self, holding: Holding, signed: bytes) -> None:
        if not holding.aborted:
            self._node.add_local(holding, signed)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have finished."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()
