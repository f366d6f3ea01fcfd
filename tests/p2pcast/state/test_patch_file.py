from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec.cell import Patch
from p2pcast.codec.digest import word_dtype
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from p2pcast.state.patch_file import PatchFile, PatchWriter

V0, V1 = Version(3, 7), Version(4, 2**62)
U64 = st.integers(0, 2**64 - 1)


def patches(layout, seed: int, share: float) -> list[Patch]:
    rng = np.random.default_rng(seed)
    out = []
    for cell in layout.cells:
        kind = rng.random()
        positions = None if kind < 0.3 else np.flatnonzero(rng.random(cell.words) < share).astype(np.uint32)
        n = cell.words if positions is None else len(positions)
        words = np.frombuffer(rng.bytes(n * cell.word_bytes), word_dtype(cell.word_bytes))
        before, after = (int(x) for x in rng.integers(0, 2**64, 2, dtype=np.uint64))
        if kind < 0.9:
            out.append(Patch(cell.index, positions, words, before, after, n))
    return out


def written(path: Path, layout, found: list[Patch], state: int = 5) -> bytes:
    writer = PatchWriter(path, layout, V0, V1)
    for patch in found:
        writer.add(patch)
    writer.finish(state)
    path.chmod(0o600)
    return path.read_bytes()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1), state=U64)
def test_round_trip(world_class, seed, share, state):
    layout = world_class.layout
    found = patches(layout, seed, share)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "p"
        written(path, layout, list(reversed(found)), state)
        fd = os.open(path, os.O_RDONLY)
        file = PatchFile.open_fd(fd, layout)
        os.close(fd)
    assert (file.layout_id, file.base, file.version, file.state) == (layout.layout_id, V0, V1, state)
    assert len(file.cells) == len(found)
    for mine, got in zip(found, file.cells, strict=True):
        assert (got.cell, got.before, got.after, got.changed) == (mine.cell, mine.before, mine.after, mine.changed)
        assert got.dense is (mine.positions is None)
        assert got.words.dtype == mine.words.dtype
        assert got.words.tobytes() == mine.words.tobytes()
        assert got.words.ctypes.data % 8 == 0
        if not got.dense:
            assert got.positions.dtype == np.uint32
            assert got.positions.tolist() == mine.positions.tolist()
            assert got.positions.ctypes.data % 8 == 0
        with pytest.raises(ValueError):
            got.words.flags.writeable = True


def test_file_has_no_name_before_finish(world, tmp_path):
    path = tmp_path / "p"
    writer = PatchWriter(path, world.layout, V0, V1)
    writer.add(patches(world.layout, 1, 0.5)[0])
    assert not path.exists()
    writer.abandon()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LocalError, match="no such file"):
        PatchFile.open(path, world.layout)
    with pytest.raises(LocalError):
        PatchWriter(tmp_path / "none" / "p", world.layout, V0, V1)


def test_patch_that_does_not_fit_its_cell_is_refused(world, tmp_path):
    writer = PatchWriter(tmp_path / "p", world.layout, V0, V1)
    cell = world.layout.cells[0]
    one = np.zeros(1, word_dtype(cell.word_bytes))
    for positions in (None, np.arange(2, dtype=np.uint32)):
        with pytest.raises(IntegrityError):
            writer.add(Patch(0, positions, one, 0, 0, 1))
    writer.abandon()


def test_every_truncation_is_refused(world, tmp_path):
    path = tmp_path / "p"
    good = written(path, world.layout, patches(world.layout, 1, 0.3))
    for size in [*range(200), *range(200, len(good), 7), len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(IntegrityError):
            PatchFile.open(path, world.layout)
    path.write_bytes(good + b"\0")
    with pytest.raises(IntegrityError):
        PatchFile.open(path, world.layout)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_edited_patch_never_writes_outside_its_cells(world_class, data):
    """Any edit of header and index is refused, or the file is still safe to apply."""
    layout = world_class.layout
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "p"
        good = written(path, layout, patches(layout, data.draw(st.integers(0, 5)), 0.3))
        (end,) = struct.unpack_from("<Q", good, 64)
        bad = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.one_of(st.integers(0, 127), st.integers(end, len(good) - 1), st.integers(128, end - 1)))
            bad[at] = data.draw(st.integers(0, 255))
        path.write_bytes(bad)
        try:
            file = PatchFile.open(path, layout)
        except IntegrityError:
            return
        for change in file.cells:
            cell = layout.cells[change.cell]
            assert len(change.words) == (cell.words if change.dense else len(change.positions))
            if not change.dense:
                assert all(p < cell.words for p in change.positions.tolist())
                assert np.all(np.diff(change.positions.astype(np.int64)) > 0)


ENTRY = struct.Struct("<IIQQQQQQ")
HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 2**32 - 1), (0, 1), (1, 2), (1, 1), (2, HUGE), (2, 0), (2, 2**61), (3, HUGE), (3, 0), (3, 132),
        (4, HUGE), (4, HUGE - 7), (4, 128), (4, 64), (7, HUGE),
    ],
)  # fmt: skip
def test_attacks_on_the_index_are_refused(world, tmp_path, field, value):
    path = tmp_path / "p"
    found = [
        Patch(c, np.arange(3, dtype=np.uint32), np.zeros(3, word_dtype(world.layout.cells[c].word_bytes)), 1, 2, 3)
        for c in (0, 1)
    ]
    good = bytearray(written(path, world.layout, found))
    (end,) = struct.unpack_from("<Q", good, 64)
    entry = list(ENTRY.unpack_from(good, end))
    entry[field] = value
    ENTRY.pack_into(good, end, *entry)
    path.write_bytes(good)
    with pytest.raises(IntegrityError):
        PatchFile.open(path, world.layout)


def crafted(layout, rows: list[tuple[int, int, int, int]], end: int) -> bytes:
    """Sparse rows (cell, n, offset of positions, offset of words) with arbitrary values; the positions are 0, 1, …"""
    body = bytearray(end - 128)
    for _, n, at, _ in rows:
        body[at - 128 : at - 128 + 4 * n] = np.arange(n, dtype="<u4").tobytes()
    head = b"p2pp\x01\0\0\0" + layout.layout_id + struct.pack("<IIQQQIIQ40x", 0, 0, 0, 1, end, len(rows), 0, 5)
    return head + bytes(body) + b"".join(ENTRY.pack(c, 0, n, at, words, 1, 2, n) for c, n, at, words in rows)


@pytest.mark.parametrize(
    ("rows", "end", "fine"),
    [
        ([(1, 2, 128, 136), (2, 2, 144, 152)], 160, True),
        ([(2, 2, 128, 136), (3, 2, 144, 152)], 160, True),
        ([(1, 2, 128, 136), (2, 2, 144, 152)], 168, False),  # a hole before the index
        ([(1, 2, 128, 136), (2, 2, 152, 160)], 168, False),  # a hole between rows
        ([(1, 2, 136, 144), (2, 2, 152, 160)], 168, False),  # a hole before the first
        ([(1, 2, 128, 144)], 152, False),  # a hole inside a row
        ([(1, 2, 128, 128)], 136, False),  # words at the offset of positions
        ([(1, 2, 136, 128)], 144, False),  # words before positions
        ([(1, 2, 128, 136), (2, 2, 128, 136)], 144, False),  # one row for two cells
        ([(1, 2, 128, 136), (2, 2, 136, 144)], 152, False),  # rows that overlap
        ([(2, 2, 128, 136), (1, 2, 144, 152)], 160, False),  # cells that descend
    ],
)
def test_rows_must_fill_the_file(world, tmp_path, rows, end, fine):
    assert [world.layout.cells[c].word_bytes for c in (1, 2, 3)] == [4, 4, 4]
    path = tmp_path / "p"
    path.write_bytes(crafted(world.layout, rows, end))
    if fine:
        assert len(PatchFile.open(path, world.layout).cells) == len(rows)
    else:
        with pytest.raises(IntegrityError, match=r"rows that|out of order"):
            PatchFile.open(path, world.layout)


@pytest.mark.parametrize("positions", [[0, 0], [1, 0], [0, 10], [0, 2**32 - 1], [2**31, 1]])
def test_attacks_on_the_positions_are_refused(world, tmp_path, positions):
    cell = world.layout.cells[0]
    assert cell.words == 10
    words = np.zeros(len(positions), word_dtype(cell.word_bytes))
    path = tmp_path / "p"
    written(path, world.layout, [Patch(0, np.array(positions, np.uint32), words, 1, 2, 1)])
    with pytest.raises(IntegrityError, match="positions"):
        PatchFile.open(path, world.layout)


def test_patch_matches_its_golden_bytes(world, tmp_path):
    """Two cells, one sparse and one dense, byte by byte as in docs/formats/delta-format.md §8."""
    layout = world.layout
    sparse, dense = layout.cells[1], layout.cells[-1]
    assert (sparse.word_bytes, dense.word_bytes, dense.words) == (4, 1, 4)
    found = [
        Patch(dense.index, None, np.arange(1, 5, dtype=np.uint8), 7, 8, 2),
        Patch(sparse.index, np.array([1, 4, 6], np.uint32), np.array([16, 17, 18], np.uint32), 9, 2**64 - 1, 3),
    ]
    want = b"p2pp\x01\0\0\0" + layout.layout_id + struct.pack("<IIQQ", 3, 4, 7, 2**62)
    want += struct.pack("<QIIQ", 168, 2, 0, 5) + bytes(40)
    want += bytes([1, 2, 3, 4, 0, 0, 0, 0])
    want += struct.pack("<3I4x", 1, 4, 6) + struct.pack("<3I4x", 16, 17, 18)
    want += ENTRY.pack(sparse.index, 0, 3, 136, 152, 9, 2**64 - 1, 3)
    want += ENTRY.pack(dense.index, 1, 4, 0, 128, 7, 8, 2)
    assert written(tmp_path / "p", layout, found) == want
