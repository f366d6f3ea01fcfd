"""Change statistics match plain counting in floating point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec import change_statistics
from p2pcast.codec.change_statistics import ACROSS, AWAY, MOVE_UNIT, TOWARDS, count_cell, count_steps, stated_changes
from p2pcast.codec.floats import FORMATS
from p2pcast.codec.layout import Cell

FLOATS = [("BF16", 2), ("F16", 2), ("F32", 4), ("F64", 8), ("F8_E4M3", 1), ("F8_E5M2", 1)]


def bf16(*values):
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_counts_of_a_hand_made_change():
    old = bf16(1.0, -1.0, 1.0, 2.0, 0.5, 0.0, 1e-3)
    new = old + np.array([1, 1, -3, 0, 0, 0, 0], np.int16).view(np.uint16)
    new[5] = bf16(-0.5)[0]
    positions = np.flatnonzero(old != new)
    found = count_cell("BF16", old, positions, new[positions])
    assert (found.words, found.changed, found.counted, found.exact) == (7, 4, 4, True)
    assert found.ulps[0].tolist() == [2, 0, 0]  # +1 is away from zero, whatever the sign
    assert found.ulps[2].tolist() == [0, 1, 0]  # three ULPs lie in 3–4
    assert found.ulps[14].tolist() == [0, 0, 1]  # 0 → −0.5 passes 16 128 ULPs
    assert found.ulps.sum() == 4
    assert found.moved * MOVE_UNIT == 2**-7 + 2**-7 + 3 * 2**-8 + 0.5
    form = FORMATS["BF16"]
    assert change_statistics.by_exponent(form, found.magnitudes.words) == {0: 3, 1: 1, -1: 1, -10: 1}
    assert change_statistics.by_exponent(form, found.magnitudes.changed) == {0: 3}


@given(data=st.data(), seed=st.integers(0, 1 << 32), words=st.integers(1, 500))
@settings(max_examples=120, deadline=None)
def test_counts_cover_every_word_and_thresholds_are_exact(data, seed, words):
    dtype, width = data.draw(st.sampled_from(FLOATS))
    rng = np.random.default_rng(seed)
    old = np.frombuffer(rng.bytes(words * width), f"<u{width}")
    new = np.where(rng.random(words) < 0.3, np.frombuffer(rng.bytes(words * width), f"<u{width}"), old)
    positions = np.flatnonzero(old != new)
    form = FORMATS[dtype]
    threshold = data.draw(st.sampled_from([1e-30, 1e-3, 1.0, 64.0]))
    found = count_cell(dtype, old, positions, new[positions], form.least_magnitude_of(threshold))
    assert found.ulps.sum() == found.changed == positions.size
    top = 1 << (8 * width - 1)
    values = [form.value(m) for m in (int(w) % top for w in old) if m < form.first_nonfinite]
    assert found.magnitudes.words.sum() == len(values)
    assert found.magnitudes.below_threshold == sum(v < threshold for v in values)
    about = change_statistics.below(form, found.magnitudes.words, threshold)
    least = form.least_magnitude_of(threshold)
    same_bin = [v for v in values if form.least_magnitude_of(v) >> form.dropped == least >> form.dropped]
    assert abs(about - found.magnitudes.below_threshold) <= len(same_bin)
    if values:
        median = change_statistics.quantile(form, found.magnitudes.words, 0.5)
        wanted = sorted(values)[(len(values) - 1) // 2]
        assert wanted / 1.15 <= median <= wanted * 1.3 or form.least_magnitude_of(wanted) >> form.mantissa == 0
    assert np.isfinite(found.moved)


@given(width=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_steps_alone_give_the_same_counts_without_sign_changes(width, seed):
    dtype = {1: "F8_E5M2", 2: "BF16", 4: "F32", 8: "F64"}[width]
    rng = np.random.default_rng(seed)
    old = np.frombuffer(rng.bytes(200 * width), f"<u{width}").copy()
    positions = np.flatnonzero(rng.random(200) < 0.3)
    new = old.copy()
    new[positions] ^= np.array(rng.integers(1, 1 << min(30, 8 * width - 1), positions.size), new.dtype)
    whole = count_cell(dtype, old, positions, new[positions])
    alone = count_steps(200, new[positions] - old[positions])
    assert whole.ulps.tolist() == alone.ulps.tolist()
    assert (alone.words, alone.changed, alone.magnitudes) == (200, positions.size, None)


def test_largest_doubles_do_not_overflow_the_sum():
    """Regression: 216 random words, of which 65 change."""
    for old, new in (((1.7e308,) * 300, (-1.7e308,) * 300), ((1.7e308,), (-1.7e308,))):
        found = count_cell("F64", np.array(old).view(np.uint64), np.arange(len(old)), np.array(new).view(np.uint64))
        assert found.moved == pytest.approx(len(old) * (1.7e308 / MOVE_UNIT * 2))
    rng = np.random.default_rng(216)
    old = np.frombuffer(rng.bytes(216 * 8), "<u8")
    new = np.where(rng.random(216) < 0.3, np.frombuffer(rng.bytes(216 * 8), "<u8"), old)
    positions = np.flatnonzero(old != new)
    assert 0 < count_cell("F64", old, positions, new[positions]).moved < np.inf


def test_infinities_and_nan_are_left_out_of_moves():
    old, new = bf16(1.0, np.inf, np.nan, -np.inf, 3.0), bf16(np.nan, 2.0, 5.0, np.inf, 4.0)
    found = count_cell("BF16", old, np.arange(5), new)
    assert (found.changed, found.moved * MOVE_UNIT, found.magnitudes.words.sum()) == (5, 1.0, 2)


def test_integers_have_steps_and_no_magnitudes():
    old = np.array([3, 255, 0], np.uint8)
    new = np.array([5, 1, 255], np.uint8)
    found = count_cell("I8", old, np.arange(3), new)
    assert [found.ulps[1, AWAY], found.ulps[1, ACROSS], found.ulps[0, ACROSS]] == [1, 1, 1]
    assert found.magnitudes is None
    assert count_cell("U8", old, np.arange(3), new).ulps[8, TOWARDS] == 1


def test_counts_of_parts_add_up(monkeypatch):
    rng = np.random.default_rng(1)
    old = rng.standard_normal(5000).astype(np.float32).view(np.uint32)
    new = old + (rng.random(5000) < 0.1).astype(np.uint32) * rng.integers(1, 99, 5000, dtype=np.uint32)
    positions = np.flatnonzero(old != new)
    whole = count_cell("F32", old, positions, new[positions], FORMATS["F32"].least_magnitude_of(0.5))
    parts = change_statistics.ChangeCounts()
    monkeypatch.setattr(change_statistics, "_CHUNK", 7)
    for part in (slice(0, 1700), slice(1700, 5000)):
        where = np.flatnonzero(old[part] != new[part])
        parts.add(count_cell("F32", old[part], where, new[part][where], FORMATS["F32"].least_magnitude_of(0.5)))
    assert (parts.words, parts.changed, parts.counted) == (whole.words, whole.changed, whole.counted)
    assert parts.ulps.tolist() == whole.ulps.tolist()
    assert parts.moved == pytest.approx(whole.moved)
    for name in ("words", "changed"):
        assert getattr(parts.magnitudes, name).tolist() == getattr(whole.magnitudes, name).tolist()
    assert (parts.magnitudes.below_threshold, parts.magnitudes.changed_below) == (
        whole.magnitudes.below_threshold,
        whole.magnitudes.changed_below,
    )


@pytest.mark.parametrize("changes", [1, 100, 5000, 20_000])
def test_stated_changes_match_the_payload(changes):
    cell = Cell(0, 0, 0, 20_000, 2, 0, 100)
    old = np.arange(20_000, dtype=np.uint16)
    new = old.copy()
    new[:changes] += 1
    for name, wanted in (("flat", changes), ("context", changes), ("dense", None), ("raw", None)):
        coded = codec.encode(cell, old, new, codec=name)
        assert stated_changes(coded.codec, coded.payload) == wanted
    assert stated_changes(codec.CONTEXT, coded.payload[:10]) is None
