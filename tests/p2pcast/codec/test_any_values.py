"""Any dtype, any share of changes, values that arithmetic would alter: every codec returns the exact bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec.digest import digest, word_dtype
from p2pcast.codec.layout import DTYPES, Cell, Layout, Tensor
from p2pcast.ground.errors import IntegrityError

NAMES = ["auto", "flat", "dense", "raw", "context"]


def special(width: int) -> list[int]:
    """Zeros, infinities, quiet and signalling NaNs with payloads, extreme numbers of both signs, and unsigned
    wraparound.
    """
    sign = 1 << 8 * width - 1
    fractions = {1: (2, 3), 2: (7, 10), 4: (23,), 8: (52,)}[width]
    found = {0, 1, 2, sign - 1, sign - 2, 2 * sign - 1}
    for bits in fractions:
        infinity = sign - (1 << bits)
        found |= {
            1 << bits,
            (1 << bits) - 1,
            infinity,
            infinity - 1,
            infinity + 1,
            infinity + (1 << bits - 1),
            infinity + (1 << bits) - 1,
        }
    return sorted(found | {value ^ sign for value in found})


def there_and_back(cell: Cell, old: np.ndarray, new: np.ndarray, name: str) -> None:
    coded = codec.encode(cell, old, new, codec=name)
    if coded is None:
        assert old.tobytes() == new.tobytes()
        return
    assert coded.changed == np.count_nonzero(old != new)
    assert (coded.before, coded.after) == (digest(old, cell), digest(new, cell))
    patch = codec.decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
    target = old.copy()
    codec.apply(patch, target)
    assert target.tobytes() == new.tobytes()


@given(
    dtype=st.sampled_from(sorted(DTYPES)), elements=st.integers(0, 700), density=st.floats(0, 1),
    near=st.booleans(), columns=st.booleans(),
    start=st.sampled_from([0, 1, 1023, (1 << 33) + 5]), name=st.sampled_from(NAMES), seed=st.integers(0, 1 << 32),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_round_trip_of_every_dtype_and_density(dtype, elements, density, near, columns, start, name, seed):
    """``near``: changes are steps of one, as in training; else any word becomes any other."""
    tensor = Tensor("t", dtype, (elements,))
    if not tensor.words:
        assert Layout([tensor]).cells == ()
        return
    draw = np.random.default_rng(seed)
    width = tensor.word_bytes
    kinds = np.array(special(width), np.uint64).astype(word_dtype(width))
    old = np.where(
        draw.random(tensor.words) < 0.3,
        draw.choice(kinds, tensor.words),
        np.frombuffer(draw.bytes(tensor.nbytes), kinds.dtype),
    )
    chosen = draw.random(tensor.words) < density
    steps = draw.choice(np.array([1, -1], np.int64), tensor.words).astype(kinds.dtype)
    new = np.where(chosen, old + steps if near else draw.choice(kinds, tensor.words), old)
    there_and_back(Cell(0, 2, start, tensor.words, width, 0, 37 if columns else 0), old, new, name)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_special_value_changes_to_every_other(width, name):
    values = np.array(special(width), np.uint64).astype(word_dtype(width))
    old, new = (grid.reshape(-1) for grid in np.meshgrid(values, values))
    cell = Cell(0, 0, 0, old.size, width, 0, values.size)
    there_and_back(cell, old, new, name)
    there_and_back(cell, new, old, name)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_of_one_element(name):
    for width in (1, 2, 4, 8):
        word = word_dtype(width)
        for row_words in (0, 1):
            there_and_back(
                Cell(0, 0, 0, 1, width, 0, row_words), np.zeros(1, word), np.full(1, -1, f"<i{width}").view(word), name
            )


def reference_digest(positions: list[int], words: list[int], tensor: int) -> int:
    """docs/formats/delta-format.md §2 for one-byte words."""

    def mix(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ x >> shift) * factor) % (1 << 64)
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    total = 0
    for lane, word in zip(positions, words, strict=True):
        table = mix(golden * (lane % 1024 + 1) % (1 << 64))
        total += word * table * (mix((mix(tensor + 1) + golden * (lane // 1024 + 1)) % (1 << 64)) | 1)
    return total % (1 << 64)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_past_element_two_to_the_32(tmp_path, name):
    """In a tensor of more than 2³² elements (a mapped sparse file): one cell past 2³¹ and one past 2³²."""
    elements, middle = (1 << 32) + 3001, (1 << 31) + 1
    layout = Layout([Tensor("big", "U8", (elements,))], cuts={0: [middle, middle + 5000]})
    states = []
    for path in (tmp_path / "old", tmp_path / "new"):
        with path.open("wb") as file:
            file.truncate(elements)
        states.append(np.memmap(path, np.uint8, "r+"))
    assert sum(cell.words for cell in layout.cells) == elements
    found = [cell for cell in layout.cells if cell.words in (5000, 3001)]
    assert [cell.start for cell in found] == [middle, 1 << 32]
    for cell in found:
        old, new = (state[cell.start : cell.start + cell.words] for state in states)
        at = [0, cell.words // 2, cell.words - 1]
        new[at] = [255, 1, 128]
        coded = codec.encode(cell, old, new, codec=name)
        assert coded is not None
        assert (coded.before, coded.after) == (
            0,
            reference_digest([cell.start + p for p in at], [255, 1, 128], cell.tensor),
        )
        there_and_back(cell, old, new, name)
        with pytest.raises(IntegrityError, match="wrong base"):
            codec.decode(cell, coded.codec, coded.payload, np.asarray(new), coded.before, coded.after)
