"""The outcomes of a piece: new, duplicate, unvouched, corrupt."""

from __future__ import annotations

from p2pcast.relay.verified_pieces import PieceOffer


def test_only_a_new_piece_with_the_right_hash_is_taken(maker):
    made = maker.make([5000] * 20, piece=1024)
    artifact = maker.artifact(made, batches=1, held=0, sealed=False)
    payloads = [memoryview(p) for p in made.pieces(1024)]
    vouched = artifact.assembly.linked_pieces
    assert 0 < vouched < len(payloads)
    assert artifact.offer(0, payloads[1]) is PieceOffer.CORRUPT
    assert artifact.offer(0, payloads[0][:-1]) is PieceOffer.CORRUPT
    assert artifact.held.count == 0
    assert artifact.offer(0, payloads[0]) is PieceOffer.NEW
    assert artifact.offer(0, payloads[0]) is PieceOffer.DUPLICATE
    assert artifact.offer(0, payloads[1]) is PieceOffer.DUPLICATE, "the payload of a held piece is not checked"
    assert artifact.offer(vouched, payloads[vouched]) is PieceOffer.UNVOUCHED
    assert artifact.offer((1 << 32) - 1, payloads[0]) is PieceOffer.UNVOUCHED
    assert not artifact.complete
    for batch in made.batches[1:]:
        artifact.assembly.add_batch(batch)
    for index, payload in enumerate(payloads):
        artifact.offer(index, payload)
    assert not artifact.complete, "the manifest is missing"
    artifact.assembly.add_manifest(made.manifest)
    assert artifact.complete


def test_an_empty_artifact_is_complete_when_sealed(maker):
    made = maker.make([])
    assert not maker.artifact(made, sealed=False).complete
    assert maker.artifact(made).complete
