"""Anchors are whole checkpoint folders that match their digests."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from artifacts_at_hand import KEY, LAYOUT, again, put

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.digest import digest
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version


def test_anchor_is_an_ordinary_checkpoint_folder(store):
    stored, log = put(store, "anchor", 0)
    checkpoint = Checkpoint.open(stored.path)
    assert checkpoint.layout(cell_words=500).layout_id == LAYOUT.layout_id
    data = b"".join(checkpoint.words(cell).tobytes() for cell in LAYOUT.cells)
    assert data == log[: LAYOUT.nbytes]
    assert checkpoint.small_files() == store.small_files(Version(0, 0))
    assert not (stored.path / ".files").exists()


def test_written_anchor_is_signed_and_found_again(store):
    words = {c.index: np.arange(c.words, dtype=f"<u{c.word_bytes}") for c in LAYOUT.cells}
    digests = np.array([digest(words[c.index], c) for c in LAYOUT.cells], dtype="<u8")
    files = {"config.json": b"{}", "sub/x": b""}
    stored = store.write_anchor(KEY, b"i" * 16, Version(0, 3), LAYOUT, lambda c: words[c.index], digests, files)
    reopened = again(store)
    assert reopened.damaged == []
    found = reopened.artifacts[stored.id]
    assert found.manifest.state == int(digests.sum(dtype="<u8"))
    log = reopened.open_log(found)
    expected = b"".join(words[c.index].tobytes() for c in LAYOUT.cells) + b"{}"
    assert log.read(0, len(expected)) == expected
    for piece in range(found.assembly.pieces):
        size = found.assembly.piece_bytes(piece)
        payload = log.read(piece * found.assembly.open.piece, size)
        assert blake3.blake3(payload).digest() == found.assembly.piece_hash(piece)
    log.close()
    assert reopened.small_files(Version(0, 3)) == files


def test_interrupted_replacement_restores_the_old_anchor(store):
    words = {c.index: np.arange(c.words, dtype=f"<u{c.word_bytes}") for c in LAYOUT.cells}
    digests = np.array([digest(words[c.index], c) for c in LAYOUT.cells], dtype="<u8")
    stored = store.write_anchor(KEY, b"i" * 16, Version(0, 3), LAYOUT, lambda c: words[c.index], digests, {})
    stored.path.rename(store.root / "partial" / "0.3.replaced")
    assert stored.id in again(store).artifacts
    assert list((store.root / "partial").iterdir()) == []


def test_anchor_with_wrong_digests_is_not_written(store):
    words = {c.index: np.arange(c.words, dtype=f"<u{c.word_bytes}") for c in LAYOUT.cells}
    digests = np.zeros(len(LAYOUT.cells), dtype="<u8")
    with pytest.raises(IntegrityError, match="does not match its digest"):
        store.write_anchor(KEY, b"i" * 16, Version(0, 3), LAYOUT, lambda c: words[c.index], digests, {})
    assert list((store.root / "partial").iterdir()) == []
    assert again(store).artifacts == {}
