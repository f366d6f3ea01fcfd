"""Pieces read back from the store for children that lag."""

from __future__ import annotations

import pytest

from p2pcast.ground.errors import IntegrityError
from p2pcast.relay.holding import Holding
from p2pcast.relay.read_ahead import read_pieces
from p2pcast.store.artifact_store import ArtifactStore


class SealsFirst:
    """A log whose artifact another thread seals just before the read."""

    def __init__(self, log, seal):
        self.log, self.seal = log, seal

    def read(self, offset, size, *, short=False):
        self.seal()
        return self.log.read(offset, size, short=short)


@pytest.fixture
def stored(maker, tmp_path):
    made = maker.make([5000] * 9, piece=4096)
    store = ArtifactStore(tmp_path, maker.key.public)
    artifact = maker.artifact(made, sealed=False)
    log = store.begin(artifact.open, maker.layout)
    log.write(0, [made.log])
    yield made, store, artifact, log
    log.close()


def test_the_last_piece_ends_where_the_log_ends(stored):
    made, _, artifact, log = stored
    last = artifact.assembly.pieces - 1
    got = read_pieces(Holding(artifact, log), range(last - 2, last + 1))
    assert [bytes(p) for p in got] == made.pieces(4096)[-3:]


def test_a_seal_during_the_read_does_not_lengthen_the_last_piece(stored):
    """In the sealed file a tail follows the log. The tail is not part of the last piece."""
    made, store, artifact, log = stored

    def seal() -> None:
        artifact.assembly.add_manifest(made.manifest)
        store.seal(log, artifact.assembly)

    last = artifact.assembly.pieces - 1
    got = read_pieces(Holding(artifact, SealsFirst(log, seal)), range(last - 2, last + 1))
    assert [bytes(p) for p in got] == made.pieces(4096)[-3:]


def test_a_piece_that_the_disk_damaged_is_not_passed_on(stored):
    made, _, artifact, log = stored
    log.write(4096, [b"?"])
    assert [bytes(p) for p in read_pieces(Holding(artifact, log), range(1))] == made.pieces(4096)[:1]
    with pytest.raises(IntegrityError, match=r"piece 1 of 0\.1 is damaged in the store"):
        read_pieces(Holding(artifact, log), range(3))
