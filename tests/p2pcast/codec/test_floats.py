"""Float formats agree with torch's dtypes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pcast.codec.floats import FORMATS, signs_and_magnitudes, thresholds_shown

TORCH = {
    "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


@pytest.mark.parametrize("dtype", TORCH)
def test_values_of_all_narrow_words_match_torch(dtype):
    form = FORMATS[dtype]
    raw = np.arange(1 << (form.bits - 1), dtype=np.uint16 if form.bits == 16 else np.uint8)
    values = torch.from_numpy(raw.view(f"<i{raw.itemsize}")).view(TORCH[dtype]).double().tolist()
    assert [form.value(m) for m in range(min(form.first_nonfinite, raw.size))] == values[: form.first_nonfinite]
    assert not any(map(math.isfinite, values[form.first_nonfinite :]))


@pytest.mark.parametrize(("dtype", "numpy"), [("F32", np.float32), ("F64", np.float64)])
def test_values_of_wide_words_match_numpy(dtype, numpy):
    form = FORMATS[dtype]
    values = [0.0, 1.0, 1.5, 1e-3, 3.25e7, float(np.finfo(numpy).tiny), float(np.finfo(numpy).smallest_subnormal)]
    words = np.array(values, numpy).view(f"<u{form.bits // 8}")
    assert [form.value(int(w)) for w in words] == np.array(values, numpy).tolist()


@pytest.mark.parametrize("dtype", FORMATS)
def test_least_magnitude_of_is_minimal(dtype):
    form = FORMATS[dtype]
    for value in (0.0, 1e-3, 0.75, 1.0, 5.1, 1e300):
        least = form.least_magnitude_of(value)
        assert least == form.first_nonfinite or form.value(least) >= value
        assert least == 0 or form.value(least - 1) < value


def test_visible_ratio_is_exact():
    assert (FORMATS["BF16"].visible_ratio, FORMATS["F16"].visible_ratio, FORMATS["F8_E4M3"].visible_ratio) == (
        256,
        2048,
        16,
    )


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_signs_and_magnitudes_of_each_kind(width):
    bits = 8 * width
    words = np.array([0, 1, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 1], f"<u{width}")
    top = 1 << (bits - 1)
    negative, far = signs_and_magnitudes(words, f"I{bits}")
    assert negative.tolist() == [False] * 3 + [True] * 3
    assert far.tolist() == [0, 1, top - 1, top, top - 1, 1]
    negative, far = signs_and_magnitudes(words, f"U{bits}")
    assert not negative.any()
    assert far.tolist() == words.tolist()
    negative, far = signs_and_magnitudes(words, {1: "F8_E5M2", 2: "BF16", 4: "F32", 8: "F64"}[width])
    assert negative.tolist() == [False] * 3 + [True] * 3
    assert far.tolist() == [0, 1, top - 1, 0, 1, top - 1]


def test_thresholds_name_the_given_dtypes():
    assert thresholds_shown(["BF16", "BF16"]) == "256·η"
    assert thresholds_shown(["F32", "I32"]) == "2^24·η"
    assert thresholds_shown(["BF16", "F16", "F8_E4M3"]) == "256·η (BF16), 2048·η (F16), 16·η (F8_E4M3)"
    assert thresholds_shown(["F32", "C64"]) == "2^24·η"
    assert thresholds_shown(["U8"]) == ""
