"""Squashes as artifacts of a store."""

from __future__ import annotations

import os
from typing import NamedTuple

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.piece_size import LEAST_PIECE_BYTES
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, Open, run_id
from p2pcast.ground.version import Version
from p2pcast.state.squash_artifact import make_squash
from p2pcast.store.artifact_log import ArtifactLog
from p2pcast.store.artifact_store import ArtifactStore

KEY = RunKey(bytes([5]) * 32)


class Part(NamedTuple):
    assembly: Assembly
    log: ArtifactLog


def put(store: ArtifactStore, world, old: bytes, new: bytes, step: int) -> Part:
    record = Open(
        os.urandom(16), Version(0, step - 1), DELTA, world.layout.layout_id, 1024, run_id(KEY.public), Version(0, step)
    )
    packer, log = Packer(KEY, record, world.layout), store.begin(record, world.layout)
    for placed, payload in world.delta(old, new, "flat"):
        log.write(packer.log_bytes, [payload])
        packer.add_cell(placed.cell, placed.codec, payload, placed.before, placed.after)
    assembly = Assembly(packer.open_signed, KEY.public, world.layout)
    *batches, manifest = packer.seal(world.digest(new))
    for batch in batches:
        assembly.add_batch(batch)
    assembly.add_manifest(manifest)
    stored = store.seal(log, assembly)
    log.close()
    return Part(stored.assembly, store.open_log(stored))


def test_small_squash_has_small_pieces(world, tmp_path):
    states = [world.state(0)]
    states += [world.step(states[0], 1)]
    states += [world.step(states[1], 2)]
    store = ArtifactStore(tmp_path, KEY.public)
    parts = [put(store, world, states[n], states[n + 1], n + 1) for n in range(2)]
    made = make_squash(store, KEY, parts, None, lambda: None)
    assert (made.assembly.open.base, made.version) == (Version(0, 0), Version(0, 2))
    assert made.assembly.open.piece == LEAST_PIECE_BYTES
    assert made.manifest.state == world.digest(states[2])
