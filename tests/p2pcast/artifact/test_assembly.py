"""Packer and Assembly as a pair."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.artifact import Assembly, Batch, CellEntry, FileEntry, Manifest, Open, Packer, RunKey, run_id
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, UsageError
from p2pcast.ground.version import Version

Make = Callable[..., Any]


def _opened(made: Any) -> Assembly:
    return Assembly(made.open, made.key.public, made.layout)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), greedy=st.booleans(), kind=st.sampled_from(["delta", "anchor"]))
def test_batches_in_any_order_give_the_same_directory(make_artifact: Make, seed: int, greedy: bool, kind: str) -> None:
    draw = random.Random(seed)
    made = make_artifact(seed, greedy=greedy, kind=kind, cells=draw.randrange(0, 41), files=draw.randrange(3))
    arrivals = [*made.batches, made.manifest, *draw.sample(made.batches, len(made.batches) // 2)]
    draw.shuffle(arrivals)
    assembly = _opened(made)
    placed = []
    for signed in arrivals:
        if signed is made.manifest:
            assembly.add_manifest(signed)
        else:
            placed += assembly.add_batch(signed)
    assert assembly.complete_directory
    assert [p.cell for p in placed] == made.cells
    assert placed == assembly.directory
    assert assembly.signed_batches() == made.batches
    at = 0
    for entry in placed:
        assert entry.offset == at
        at += entry.bytes
    at = 0
    for piece in range(assembly.pieces):
        size = assembly.piece_bytes(piece)
        assert size is not None
        assert blake3.blake3(made.log[at : at + size]).digest() == assembly.piece_hash(piece)
        assert assembly.batch_for_piece(piece) in made.batches
        at += size
    assert at == len(made.log)
    for outside in (-1, assembly.pieces):
        assert assembly.piece_hash(outside) is None
        assert assembly.piece_bytes(outside) is None
        assert assembly.batch_for_piece(outside) is None


def test_batch_out_of_order_is_usable_at_once(make_artifact: Make) -> None:
    made = make_artifact(1)
    assembly = _opened(made)
    assert len(made.batches) > 2
    assert assembly.add_batch(made.batches[-1]) == []
    assert assembly.pieces == -(-len(made.log) // 1024)
    assert assembly.piece_hash(assembly.pieces - 1) is not None
    assert assembly.piece_hash(0) is None
    assert assembly.piece_bytes(0) == 1024
    assert assembly.piece_bytes(assembly.pieces - 1) is None  # may be the last piece
    assert not assembly.sealed
    assembly.add_manifest(made.manifest)
    assert assembly.sealed
    assert not assembly.complete_directory
    assert assembly.piece_bytes(assembly.pieces - 1) == (len(made.log) % 1024 or 1024)


def test_pieces_of_a_range(make_artifact: Make) -> None:
    assembly = _opened(make_artifact(1))
    assert assembly.pieces_of(0, 1024) == range(1)
    assert assembly.pieces_of(1023, 2) == range(2)
    assert assembly.pieces_of(2048, 0) == range(2, 2)


def _resign(made: Any, signed: bytes, **change: Any) -> bytes:
    kind = Batch if signed != made.manifest else Manifest
    record = kind.from_signed(signed, made.key.public)
    fields = {k: change.get(k, getattr(record, k)) for k in record.__dataclass_fields__}
    return bytes(kind(**fields).to_signed(made.key))


BATCH_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"seq": 0}, "seq: another batch has this number"),
    ({"seq": 2**40}, "more than the layout can fill"),
    ({"first": 2**40}, "more than the layout can fill"),
    ({"first": 0}, "another batch vouches"),
    ({"prev": bytes(32)}, "prev: not the hash"),
    ({"cells": (CellEntry(99, 3, 1, 0, 0),)}, "not in the layout"),
    ({"cells": (CellEntry(3, 3, 1, 0, 0), CellEntry(3, 3, 1, 0, 0))}, "appears twice"),
    ({"cells": (CellEntry(3, 3, 657, 0, 0),)}, "has a payload of 657"),
    ({"cells": (CellEntry(3, 1, 199, 0, 0),)}, "has a payload of 199"),
    (
        {"hashes": bytes(32), "cells": tuple(CellEntry(c, 3, 600, 0, 0) for c in range(30, 38))},
        "end after the batch's pieces",
    ),
]


@pytest.mark.parametrize(("change", "words"), BATCH_FAULTS)
def test_contradicting_batch_breaks_the_artifact(make_artifact: Make, change: dict[str, Any], words: str) -> None:
    made = make_artifact(5, cells=20, greedy=True)
    assembly = _opened(made)
    assembly.add_batch(made.batches[0])
    free = [c for c in range(41) if c not in made.cells]
    if "cells" in change:  # cells in no other batch
        change = {
            **change,
            "cells": tuple(c._replace(cell=free[c.cell % len(free)]) if c.cell < 41 else c for c in change["cells"]),
        }
    forged = _resign(made, made.batches[1], **change)
    with pytest.raises(IntegrityError, match=words):
        assembly.add_batch(forged)
    with pytest.raises(IntegrityError, match=words):
        assembly.add_batch(made.batches[1])


def test_gap_is_detected_when_batches_link(make_artifact: Make) -> None:
    made = make_artifact(5, cells=20)
    assembly = _opened(made)
    assembly.add_batch(made.batches[0])
    second = Batch.from_signed(made.batches[1], made.key.public)
    with pytest.raises(IntegrityError, match="are skipped"):
        assembly.add_batch(_resign(made, made.batches[1], first=second.first + 1))


def test_cell_in_two_batches_is_refused(make_artifact: Make) -> None:
    made = make_artifact(5, cells=20)
    assembly = _opened(made)
    first = Batch.from_signed(made.batches[0], made.key.public)
    assembly.add_batch(made.batches[0])
    with pytest.raises(IntegrityError, match="appears twice"):
        assembly.add_batch(_resign(made, made.batches[1], cells=first.cells[:1]))


MANIFEST_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"artifact": bytes(16)}, "artifact"),
    ({"base": Version(0, 0)}, "base"),
    ({"version": Version(0, 3)}, "version"),
    ({"layout": bytes(32)}, "layout"),
    ({"run": bytes(16)}, "run"),
    ({"log": 10**9}, "pieces"),
    ({"log": 1 << 40, "pieces": 1 << 30}, "more than the layout can fill"),
    ({"batches": 10**9}, "more than the layout can fill"),
    ({"batches": 0}, "fewer than were received"),
    ({"log": 1, "pieces": 1}, "fewer than were received"),
    ({"cells": 42}, "cells"),
    ({"cells": 19}, "cells"),
    ({"last": bytes(32)}, "last"),
    ({"files": ()}, "log"),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("change", "words"), MANIFEST_FAULTS)
def test_wrong_manifest_is_refused(make_artifact: Make, change: dict[str, Any], words: str, late: bool) -> None:
    made = make_artifact(8, cells=20)
    assembly = _opened(made)
    forged = _resign(made, made.manifest, **change)
    if late:
        for signed in made.batches:
            assembly.add_batch(signed)

    def rest() -> None:
        assembly.add_manifest(forged)
        for signed in made.batches:
            assembly.add_batch(signed)

    if not late and words == "fewer than were received":
        words = "beyond what the manifest sealed|another batch|artifact"
    with pytest.raises(IntegrityError, match=words):
        rest()
    assert not assembly.complete_directory


def test_files_must_fill_the_end_of_the_log(make_artifact: Make) -> None:
    made = make_artifact(8, cells=20, files=3)
    manifest = Manifest.from_signed(made.manifest, made.key.public)
    held = [f for f in manifest.files if f.offset is not None]
    moved = tuple(replace(f, offset=(f.offset or 0) + 1) if f in held else f for f in manifest.files)
    assembly = _opened(made)
    for signed in made.batches:
        assembly.add_batch(signed)
    with pytest.raises(IntegrityError, match="does not begin where"):
        assembly.add_manifest(_resign(made, made.manifest, files=moved))


def test_file_beyond_the_signed_pieces_is_refused(make_artifact: Make) -> None:
    made = make_artifact(8, cells=20)
    manifest = Manifest.from_signed(made.manifest, made.key.public)
    more = FileEntry("zz", 5000, bytes(32), manifest.log)
    log = manifest.log + more.size
    assembly = _opened(made)
    assembly.add_manifest(_resign(made, made.manifest, files=(*manifest.files, more), log=log, pieces=-(-log // 1024)))
    for signed in made.batches[:-1]:
        assembly.add_batch(signed)
    with pytest.raises(IntegrityError, match="but the batches hold"):
        assembly.add_batch(made.batches[-1])


def test_second_manifest_is_a_contradiction(make_artifact: Make) -> None:
    made = make_artifact(8)
    assembly = _opened(made)
    assembly.add_manifest(made.manifest)
    assembly.add_manifest(made.manifest)
    with pytest.raises(IntegrityError, match="signature"):
        assembly.add_manifest(made.manifest[:-1] + bytes([made.manifest[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="another manifest of this artifact"):
        assembly.add_manifest(_resign(made, made.manifest, state=1))


def test_forged_and_foreign_records_change_nothing(make_artifact: Make) -> None:
    made, other = make_artifact(1), make_artifact(2)
    assembly = _opened(made)
    for signed in other.batches:
        with pytest.raises(IntegrityError, match="artifact"):
            assembly.add_batch(signed)
    for signed in made.batches:
        with pytest.raises(IntegrityError):
            assembly.add_batch(signed[:-1] + bytes([signed[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="artifact"):
        assembly.add_manifest(other.manifest)
    for signed in made.batches:
        assembly.add_batch(signed)
    assembly.add_manifest(made.manifest)
    assert assembly.complete_directory


def test_open_record_of_another_run_or_layout_is_refused(make_artifact: Make) -> None:
    made = make_artifact(1)
    with pytest.raises(IntegrityError, match="signature"):
        Assembly(made.open, RunKey.generate().public, made.layout)
    with pytest.raises(IntegrityError, match="layout"):
        Assembly(made.open, made.key.public, Layout(made.layout.tensors))
    record = Open.from_signed(made.open, made.key.public)
    with pytest.raises(IntegrityError, match="run"):
        Assembly(replace(record, run=bytes(16)).to_signed(made.key), made.key.public, made.layout)


def test_anchor_holds_every_cell_in_order(make_artifact: Make) -> None:
    made = make_artifact(3, kind="anchor")
    first = Batch.from_signed(made.batches[0], made.key.public)
    for cells, words in [
        (first.cells[1:], "in order"),
        ((first.cells[0]._replace(before=1),), "before = 0"),
        ((first.cells[0]._replace(codec=3),), "raw"),
    ]:
        with pytest.raises(IntegrityError, match=words):
            _opened(made).add_batch(_resign(made, made.batches[0], cells=cells))
    assembly = _opened(made)
    for signed in made.batches:
        assembly.add_batch(signed)
    with pytest.raises(IntegrityError, match="sum of the cells"):
        assembly.add_manifest(_resign(made, made.manifest, state=1))


def test_more_cells_than_fit_in_a_batch() -> None:
    """Thousands of scalars in one piece: the directory continues in batches without pieces."""
    key = RunKey(bytes(32))
    many = 2 * limits.BATCH_CELLS + 5
    layout = Layout(Tensor(f"s{n}", "U8", ()) for n in range(many))
    packer = Packer(
        key, Open(bytes(16), None, "anchor", layout.layout_id, 1 << 20, run_id(key.public), Version(0, 0)), layout
    )
    for cell in range(many):
        packer.add_cell(cell, 1, b"x", 0, 1)
    *batches, manifest = packer.seal(many)
    assert [len(Batch.from_signed(b, key.public).cells) for b in batches] == [limits.BATCH_CELLS, limits.BATCH_CELLS, 5]
    assert [Batch.from_signed(b, key.public).pieces for b in batches] == [1, 0, 0]
    assembly = Assembly(packer.open_signed, key.public, layout)
    for signed in reversed(batches):
        assembly.add_batch(signed)
    assembly.add_manifest(manifest)
    assert assembly.complete_directory


def _packer(kind: str = "delta") -> Packer:
    key = RunKey(bytes(32))
    layout = Layout([Tensor("a", "U8", (20,))], cell_words=10)
    base = None if kind == "anchor" else Version(0, 0)
    return Packer(key, Open(bytes(16), base, kind, layout.layout_id, 1024, run_id(key.public), Version(0, 1)), layout)


def test_packer_and_receiver_refuse_the_same_records() -> None:
    packer = _packer()
    packer.add_cell(0, 3, b"x", 0, 0)
    for cell, codec, payload, after in [
        (0, 3, b"x", 0), (2, 3, b"x", 0), (-1, 3, b"x", 0), (1, 0, b"x", 0), (1, 5, b"x", 0),
        (1, 3, b"", 0), (1, 3, bytes(277), 0),
        (1, 1, b"x", 0), (1, 3, b"x", -1), (1, 3, b"x", 2**64),
    ]:  # fmt: skip
        with pytest.raises(UsageError):
            packer.add_cell(cell, codec, payload, 0, after)
    digest = blake3.blake3(b"x").digest()
    packer.add_file("f", b"x", 1, digest)
    packer.add_file("folder/f", b"x", 1, digest)
    for path, contents, size, hash_ in [
        ("f", b"x", 1, digest),
        ("f/g", b"x", 1, digest),
        ("folder", b"x", 1, digest),
        ("../f", b"x", 1, digest),
        ("g", b"x", 2, digest),
        ("g", b"y", 1, digest),
    ]:
        with pytest.raises(UsageError):
            packer.add_file(path, contents, size, hash_)
    with pytest.raises(UsageError, match="before files"):
        packer.add_cell(1, 3, b"x", 0, 0)
    packer.seal(0)
    with pytest.raises(UsageError, match="sealed already"):
        packer.seal(0)


def test_packer_checks_an_anchors_cells() -> None:
    packer = _packer("anchor")
    with pytest.raises(UsageError, match="in order"):
        packer.add_cell(1, 1, bytes(10), 0, 0)
    packer.add_cell(0, 1, bytes(10), 0, 0)
    with pytest.raises(UsageError, match="missing"):
        packer.seal(0)
    with pytest.raises(UsageError, match="no base"):
        packer.add_file("f", None, 1, bytes(32))


def test_packer_refuses_an_open_record_of_another_run() -> None:
    packer = _packer()
    with pytest.raises(UsageError, match="another layout or run"):
        Packer(RunKey.generate(), packer.open, Layout([Tensor("a", "U8", (20,))], cell_words=10))
