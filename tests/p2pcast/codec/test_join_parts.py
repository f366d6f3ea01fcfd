"""Join: the joined parts of a cell equal the whole cell's coding, and every part must match the words in place."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec.digest import digest
from p2pcast.codec.join_parts import CellPart, assemble, join, within
from p2pcast.codec.layout import Cell
from p2pcast.ground.errors import IntegrityError, UsageError

WIDTHS = [1, 2, 4, 8]


def bits(rng, width, words):
    return np.frombuffer(rng.bytes(width * words), dtype=f"<u{width}")


def change(rng, old, share):
    new = old.copy()
    where = rng.random(old.size) < share
    top = (1 << 8 * old.dtype.itemsize) - 1
    new[where] += rng.choice(np.array([1, 2, top, top // 2 + 1], dtype=new.dtype), int(where.sum()))
    return new


def part(cell, old, new, start, end, how):
    """Words ``start`` … ``end`` as a rank codes them; None if none changed."""
    sub = within(cell, start, end - start)
    if how == "stated":
        words = new[start:end]
        return CellPart(start, end - start, codec.RAW, words.tobytes(), None, digest(words, sub))
    coded = codec.encode(sub, old[start:end], new[start:end], codec=how)
    return (
        None if coded is None else CellPart(start, end - start, coded.codec, coded.payload, coded.before, coded.after)
    )


def cut(cell, old, new, cuts, ways):
    edges = [0, *sorted({c for c in cuts if 0 < c < cell.words}), cell.words]
    made = [part(cell, old, new, a, b, ways[k % len(ways)]) for k, (a, b) in enumerate(pairwise(edges))]
    return [p for p in made if p is not None]


def same(cell, old, new, coded):
    """Check that the coded cell decodes to ``new``, against ``old`` and with both digests."""
    if coded is None:
        assert np.array_equal(old, new)
        return
    patch = codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
    got = old.copy()
    codec.apply(patch, got)
    assert np.array_equal(got, new)
    assert (coded.before, coded.after) == (digest(old, cell), digest(new, cell))
    assert coded.changed == np.count_nonzero(old != new)


@given(
    width=st.sampled_from(WIDTHS),
    words=st.integers(1, 3000),
    start=st.integers(0, 5000),
    share=st.sampled_from([0.0, 0.003, 0.1, 1.0]),
    cuts=st.lists(st.integers(1, 3000), max_size=6),
    ways=st.lists(st.sampled_from(["auto", "flat", "dense", "raw", "stated"]), min_size=1, max_size=4),
    shuffle=st.randoms(use_true_random=False),
)
@settings(max_examples=250, deadline=None)
def test_joined_parts_decode_to_the_whole(width, words, start, share, cuts, ways, shuffle):
    cell = Cell(3, 2, start, words, width, 0)
    rng = np.random.default_rng(words * 7 + start)
    old = bits(rng, width, words)
    new = change(rng, old, share)
    parts = cut(cell, old, new, cuts, ways)
    shuffle.shuffle(parts)
    same(cell, old, new, join(cell, parts, old, digest(old, cell)))


def whole_like(cell, old, new, joined):
    """The whole cell in the joined cell's codec; any codec if ``joined`` is None."""
    return codec.encode(cell, old, new, codec="auto" if joined is None else codec.CODEC_NAMES[joined.codec])


@given(
    width=st.sampled_from(WIDTHS),
    words=st.integers(2, 3000),
    share=st.sampled_from([0.001, 0.02, 0.5]),
    cuts=st.lists(st.integers(1, 2999), min_size=1, max_size=6),
    name=st.sampled_from(["auto", "flat", "dense"]),
)
@settings(max_examples=150, deadline=None)
def test_joined_flat_parts_equal_the_whole_cells_bytes(width, words, share, cuts, name):
    cell = Cell(0, 1, 40, words, width, 0)
    rng = np.random.default_rng(words)
    old = bits(rng, width, words)
    new = change(rng, old, share)
    cuts = [c % (words - 1) + 1 for c in cuts]
    joined = join(cell, cut(cell, old, new, cuts, ["flat"]), old, digest(old, cell), codec=name)
    assert joined == whole_like(cell, old, new, joined)
    if name != "auto":
        assert joined == codec.encode(cell, old, new, codec=name)


@pytest.mark.parametrize("width", WIDTHS)
def test_joined_flat_parts_of_a_large_cell(width):
    """Large enough for two-byte gaps, escapes and the rule for dense cells."""
    cell = Cell(9, 4, 1 << 20, 100_000, width, 0)
    rng = np.random.default_rng(width)
    old = bits(rng, width, cell.words)
    for share in (0.0001, 0.01, 0.3):
        new = change(rng, old, share)
        parts = cut(cell, old, new, [1, 33_333, 33_334, 99_999], ["auto"])
        joined = join(cell, parts, old, digest(old, cell))
        assert joined == whole_like(cell, old, new, joined)


def test_no_change_and_a_whole_part():
    cell = Cell(3, 2, 0, 500, 2, 0)
    draw = np.random.default_rng(1)
    old = bits(draw, 2, 500)
    before = digest(old, cell)
    assert join(cell, [], old, before) is None
    assert join(cell, [], old, before, codec="dense") is None
    new = change(draw, old, 0.05)
    whole = part(cell, old, new, 0, 500, "flat")
    coded = join(cell, [whole], old, before)
    assert coded.payload is whole.payload, "a whole part keeps its payload"
    same(cell, old, new, coded)
    unchanged = part(cell, old, old.copy(), 0, 500, "stated")
    assert join(cell, [unchanged], old, before) is None
    raw = CellPart(0, 500, codec.RAW, old.tobytes(), before, before)
    assert join(cell, [raw], old, before) is None


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("how", ["flat", "raw", "dense"])
def test_part_against_other_words_is_refused(whole, how):
    """Refused even if the sum of all digests is right: wrong steps on a wrong base can cancel in the sum."""
    cell = Cell(3, 2, 0, 400, 2, 0)
    draw = np.random.default_rng(2)
    old = bits(draw, 2, 400)
    base = old.copy()
    base[7] += 1
    new = base.copy()
    new[50] += 3
    end = 400 if whole else 300
    wrong = part(cell, base, new, 0, end, how)
    others = [] if whole else [part(cell, old, change(draw, old, 0.1), 300, 400, "flat")]
    with pytest.raises(IntegrityError, match="wrong base"):
        join(cell, [wrong, *others], old, digest(old, cell))


@pytest.mark.parametrize("how", ["flat", "dense", "raw", "stated"])
@pytest.mark.parametrize("whole", [True, False])
def test_damaged_part_is_refused_and_its_sender_named(how, whole):
    cell = Cell(3, 2, 0, 400, 2, 0)
    draw = np.random.default_rng(3)
    old = bits(draw, 2, 400)
    new = change(draw, old, 0.3)
    good = dataclasses.replace(part(cell, old, new, 0, 400 if whole else 200, how), sender="rank 2 of 4")
    before = digest(old, cell)
    join(cell, [good], old, before)
    bad = [
        dataclasses.replace(good, after=good.after ^ 1),
        dataclasses.replace(good, payload=good.payload[:-1]),
        dataclasses.replace(good, payload=b""),
        dataclasses.replace(good, payload=good.payload[:-1] + bytes([good.payload[-1] ^ 1])),
        dataclasses.replace(good, codec=77),
    ]
    for one in bad:
        with pytest.raises(IntegrityError, match=f"rank 2 of 4: cell 3, words 0 to {good.words}"):
            join(cell, [one], old, before)


def test_overlapping_parts_are_refused():
    cell = Cell(3, 2, 0, 400, 2, 0)
    old = bits(np.random.default_rng(4), 2, 400)
    new = old + np.uint16(1)
    parts = [part(cell, old, new, 0, 200, "flat"), part(cell, old, new, 199, 400, "flat")]
    with pytest.raises(IntegrityError, match="words before 200 were already sent by a part"):
        join(cell, parts, old, digest(old, cell))


@pytest.mark.parametrize(("start", "words"), [(-1, 2), (0, 0), (0, 401), (400, 1), (399, 2)])
def test_range_outside_the_cell_is_refused(start, words):
    with pytest.raises(UsageError, match="are not a range of its 400"):
        within(Cell(3, 2, 0, 400, 2, 0), start, words)


@pytest.mark.parametrize("width", WIDTHS)
def test_stated_parts_assemble_to_the_whole(width):
    cell = Cell(3, 2, 70, 400, width, 0)
    new = bits(np.random.default_rng(5), width, 400)
    parts = cut(cell, new, new, [1, 150, 151, 399], ["stated"])
    assert np.array_equal(assemble(cell, parts[::-1]), new)
    assert np.array_equal(assemble(cell, cut(cell, new, new, [], ["stated"])), new)
    for missing in range(len(parts)):
        with pytest.raises(IntegrityError, match="are missing"):
            assemble(cell, parts[:missing] + parts[missing + 1 :])
    with pytest.raises(IntegrityError, match="are missing"):
        assemble(cell, [])
    with pytest.raises(IntegrityError, match="repeated"):
        assemble(cell, [*parts, parts[2]])
    with pytest.raises(IntegrityError, match="not "):
        assemble(cell, [*parts[:-1], dataclasses.replace(parts[-1], after=1)])
    with pytest.raises(IntegrityError, match="without a base"):
        assemble(cell, [*parts[:-1], dataclasses.replace(parts[-1], before=1)])
