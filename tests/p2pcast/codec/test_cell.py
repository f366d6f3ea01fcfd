"""Coding a cell: for any dtype and change, decoding returns the encoded words or raises IntegrityError."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec.layout import DTYPES, Cell, Layout, Tensor
from p2pcast.ground.errors import IntegrityError, UsageError

WIDTHS = [1, 2, 4, 8]
NAMES = ["auto", "flat", "dense", "raw"]


def some_words(rng, width, count):
    return np.frombuffer(rng.bytes(width * count), dtype=f"<u{width}").copy()


def check_round_trip(cell, old, new, name):
    """Encode, decode, apply twice. Returns the encoded cell."""
    coded = codec.encode(cell, old, new, codec=name)
    changed = int(np.count_nonzero(old != new))
    if not changed:
        assert coded is None
        return None
    assert (coded.cell, coded.changed) == (cell.index, changed)
    assert coded.before == codec.digest(old, cell)
    assert coded.after == codec.digest(new, cell)
    patch = codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
    assert (patch.cell, patch.before, patch.after, patch.changed) == (cell.index, coded.before, coded.after, changed)
    target = old.copy()
    codec.apply(patch, target)
    assert target.tobytes() == new.tobytes()
    codec.apply(patch, target)
    assert target.tobytes() == new.tobytes()
    return coded


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_of_every_dtype(dtype, name):
    layout = Layout([Tensor("t", dtype, (7, 601))], cell_words=1500)
    rng = np.random.default_rng(1)
    for cell in layout.cells:
        old = some_words(rng, cell.word_bytes, cell.words)
        new = np.where(rng.random(cell.words) < 0.05, some_words(rng, cell.word_bytes, cell.words), old)
        check_round_trip(cell, old, new, name)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 1023, 1024, 1025, 3001])
@pytest.mark.parametrize("start", [0, 1, 1000])
def test_round_trip_of_first_last_and_all_words(width, count, start):
    cell = Cell(5, 2, start, count, width, 0)
    old = some_words(np.random.default_rng(count), width, count)
    one = old.dtype.type(1)
    for where in ([0], [count - 1], slice(None), []):
        new = old.copy()
        new[where] += one
        check_round_trip(cell, old, new, "auto")


@given(
    width=st.sampled_from(WIDTHS),
    start=st.integers(0, 3000),
    name=st.sampled_from(NAMES),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_round_trip(width, start, name, data):
    count = data.draw(st.integers(1, 700))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    old = some_words(rng, width, count)
    new = old.copy()
    where = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=60))
    steps = data.draw(st.lists(st.integers(0, (1 << 8 * width) - 1), min_size=len(where), max_size=len(where)))
    new[where] += np.array(steps, dtype=new.dtype)
    check_round_trip(Cell(0, 1, start, count, width, 0), old, new, name)


def test_special_float_bits_are_kept():
    """NaN payloads, quiet and signalling, both zeros, infinities and denormals are kept bit for bit."""
    odd = np.array(
        [0x7FC1, 0x7F81, 0xFFC1, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x7FFF, 0xFFFF], dtype="<u2"
    )
    for turn in range(1, odd.size):
        check_round_trip(Cell(0, 0, 0, odd.size, 2, 0), odd, np.roll(odd, turn), "flat")
    wide = np.array([0x7FC00001, 0x7F800001, 0x80000000, 0, 0xFF800000], dtype="<u4")
    check_round_trip(Cell(0, 0, 0, wide.size, 4, 0), wide, np.roll(wide, 1), "flat")


@pytest.mark.parametrize(
    "gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65533, 65534, 65535, 65536, 131069, 131070, 131071]
)
@pytest.mark.parametrize("changes", [1, 2, 700])
def test_gaps_at_their_escape_values(gap, changes):
    """Many changes make one-byte gaps, few make two-byte gaps; each meets its escape value once and several times in a
    row.
    """
    positions = [gap, 2 * gap + 1, *range(2 * gap + 2, 2 * gap + 2 + changes)]
    cell = Cell(0, 0, 0, positions[-1] + 3, 2, 0)
    old = np.zeros(cell.words, dtype="<u2")
    new = old.copy()
    new[positions] = 9
    check_round_trip(cell, old, new, "flat")


def test_both_gap_widths_are_used():
    old = np.zeros(100_000, dtype="<u2")
    cell = Cell(0, 0, 0, old.size, 2, 0)
    widths = set()
    for every in (10, 20_000):
        new = old.copy()
        new[::every] = 1
        widths.add(check_round_trip(cell, old, new, "flat").payload[1])
    assert widths == {1, 2}


def test_auto_takes_the_smallest_codec():
    rng = np.random.default_rng(3)
    cell = Cell(0, 0, 0, 1 << 17, 2, 0)
    old = some_words(rng, 2, cell.words)
    sparse = old.copy()
    sparse[::100] += 1
    assert check_round_trip(cell, old, sparse, "auto").codec == codec.FLAT
    assert check_round_trip(cell, old, np.zeros_like(old), "auto").codec == codec.DENSE
    noise = some_words(rng, 2, cell.words)
    coded = check_round_trip(cell, old, noise, "auto")
    assert coded.codec == codec.RAW
    assert len(coded.payload) == cell.nbytes


def test_given_before_digest_is_not_recomputed():
    cell = Cell(0, 0, 0, 10, 2, 0)
    old, new = np.zeros(10, "<u2"), np.ones(10, "<u2")
    true = codec.digest(old, cell)
    assert codec.encode(cell, old, new, before=true) == codec.encode(cell, old, new)
    moved = codec.encode(cell, old, new, before=5)
    assert moved.before == 5
    assert (moved.after - 5 - codec.digest(new, cell) + true) % (1 << 64) == 0


def test_read_only_maps_are_accepted(tmp_path):
    file = tmp_path / "state"
    rng = np.random.default_rng(0)
    raw = rng.bytes(4001)
    file.write_bytes(raw)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        old = np.frombuffer(mapped, dtype="<u2", count=1000, offset=1)
        new = np.frombuffer(mapped, dtype="<u2", count=1000, offset=2001)
        check_round_trip(Cell(0, 0, 0, 1000, 2, 0), old, new, "auto")
        del old, new


def test_threads_do_not_share_scratch():
    rng = np.random.default_rng(0)
    cells = [Cell(k, 0, k * 5000, 5000, 2, 0) for k in range(32)]
    olds = [some_words(rng, 2, 5000) for _ in cells]
    news = [o + (rng.random(5000) < 0.1).astype("<u2") for o in olds]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check_round_trip, cells, olds, news, ["flat"] * 32))


def a_coded_cell(name="flat"):
    cell = Cell(4, 1, 100, 500, 2, 0)
    old = some_words(np.random.default_rng(0), 2, 500)
    new = old.copy()
    new[[3, 77, 400]] += 2
    return cell, old, new, codec.encode(cell, old, new, codec=name)


@pytest.mark.parametrize("name", ["flat", "dense", "raw"])
def test_wrong_base_is_refused(name):
    cell, old, _, coded = a_coded_cell(name)
    old[9] ^= 1
    with pytest.raises(IntegrityError, match="cell 4: wrong base"):
        codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)


@pytest.mark.parametrize("name", ["flat", "dense", "raw"])
def test_wrong_result_is_refused(name):
    cell, old, _, coded = a_coded_cell(name)
    with pytest.raises(IntegrityError, match=f"cell 4: {name} payload leads to digest"):
        codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after ^ 1)


def test_without_check_before_only_the_payload_is_verified():
    cell, old, new, coded = a_coded_cell()
    old[9] ^= 1
    patch = codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after, check_before=False)
    assert patch.words.tolist() == new[[3, 77, 400]].tolist()
    with pytest.raises(IntegrityError, match="leads to digest"):
        codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after ^ 1, check_before=False)


@pytest.mark.parametrize("name", ["dense", "raw"])
def test_whole_cells_need_no_old_words(name):
    cell, _, new, coded = a_coded_cell(name)
    patch = codec.decode(cell, coded.codec, coded.payload, None, coded.before, coded.after)
    assert patch.positions is None
    assert patch.changed == cell.words
    assert patch.words.tolist() == new.tolist()


def test_flat_without_old_words_is_a_usage_error():
    cell, _, _, coded = a_coded_cell()
    with pytest.raises(UsageError, match=r"cell 4: .*old words"):
        codec.decode(cell, coded.codec, coded.payload, None, coded.before, coded.after)


@pytest.mark.parametrize("number", [0, 5, 6, 255, -1])
def test_unknown_codec_is_refused(number):
    cell, old, _, coded = a_coded_cell()
    with pytest.raises(IntegrityError, match="cell 4: codec"):
        codec.decode(cell, number, coded.payload, old, coded.before, coded.after)


def test_usage_errors_name_their_cause():
    cell, old, new, coded = a_coded_cell()
    with pytest.raises(UsageError, match="codec 'zip' is not one of auto, context, dense, flat, raw"):
        codec.encode(cell, old, new, codec="zip")
    with pytest.raises(UsageError, match="cell 4"):
        codec.encode(cell, old[1:], new, codec="flat")
    patch = codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
    with pytest.raises(UsageError, match="does not fit"):
        codec.apply(patch, old.astype("<u4"))
    with pytest.raises(UsageError, match="outside"):
        codec.apply(patch, old[:300].copy())


def test_payloads_may_be_any_bytes_like_object():
    cell, old, _, coded = a_coded_cell()
    for payload in (bytearray(coded.payload), memoryview(b"x" + coded.payload)[1:]):
        assert codec.decode(cell, coded.codec, payload, old, coded.before, coded.after).changed == 3
