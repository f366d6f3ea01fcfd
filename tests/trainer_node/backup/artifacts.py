"""A hub's state folder whose store has anchors and deltas, written as a hub writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from blake3 import blake3

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, Open, run_id
from p2pcast.codec.cell import encode
from p2pcast.codec.digest import MASK, digest
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.store.retention import RetentionCounts
from p2pcast.store.state_format import state_lock
from trainer_node.publish.version_numbers import FILE, VersionNumbers

LAYOUT = Layout([Tensor("a", "BF16", (50, 100))], cell_words=1000)


class HubState:
    """``counts``: numbers of artifacts that retention keeps."""

    def __init__(self, root: Path, counts: RetentionCounts | None = None) -> None:
        self.root = root
        with state_lock(root):
            self.key = RunKey.load_or_create(root / "run.key")
            (root / "hub.json").write_text(json.dumps({"node": "00" * 16, "incarnation": 3, "target": None}))
            self.store = ArtifactStore(root, self.key.public, counts=counts or RetentionCounts(100, 10))
        self.numbers = VersionNumbers(root / FILE, "boot")
        self._step = 0
        draw = np.random.default_rng(0)
        self._now = {c.index: draw.integers(0, 1 << 16, c.words).astype(f"<u{c.word_bytes}") for c in LAYOUT.cells}

    @property
    def run(self) -> str:
        return run_id(self.key.public).hex()

    def anchor(self) -> Version:
        """Publish a version as a whole state."""
        self._step += 1
        version, now = Version(0, self._step), self._now
        self.numbers.note(version)
        digests = np.array([digest(now[c.index], c) for c in LAYOUT.cells], "<u8")
        files = {"config.json": b"{}", "sub/notes.txt": str(version).encode()}
        self.store.write_anchor(self.key, os.urandom(16), version, LAYOUT, lambda c: now[c.index], digests, files)
        return version

    def delta(self) -> Version:
        """Publish the next version as a delta."""
        self._step += 1
        version, base = Version(0, self._step), Version(0, self._step - 1)
        self.numbers.note(version)
        new = {index: words.copy() for index, words in self._now.items()}
        new[self._step % len(new)][5] += 1
        piece = limits.PIECE_BYTES
        record = Open(os.urandom(16), base, DELTA, LAYOUT.layout_id, piece, run_id(self.key.public), version)
        packer, log = Packer(self.key, record, LAYOUT), self.store.begin(record, LAYOUT)
        for cell in LAYOUT.cells:
            coded = encode(cell, self._now[cell.index], new[cell.index])
            if coded is not None:
                log.write(packer.log_bytes, [coded.payload])
                packer.add_cell(coded.cell, coded.codec, coded.payload, coded.before, coded.after)
        packer.add_file("config.json", None, 2, blake3(b"{}").digest())
        self._now = new
        total = sum(digest(new[c.index], c) for c in LAYOUT.cells) & MASK
        *batches, manifest = packer.seal(total)
        tail = Tail(batches, self.key.public, LAYOUT.document, manifest, packer.open_signed)
        self.store.seal(log, tail.assembly(LAYOUT))
        log.close()
        return version
