"""Codes and scales equal those of vLLM's own quantisers on this CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from p2pcast.ground.errors import IntegrityError
from p2pcast.quantised.quantisation_kinds import KINDS
from p2pcast.quantised.quantisers import quantise
from tests.p2pcast.quantised.vllm_quantisers import QUANTISERS, Bytes, fp8_block

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((256, 256), (130, 140), (1, 1), (300, 516), (127, 4))


def weights(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Ordinary and extreme values, in shapes that do and do not fill blocks."""
    made = torch.Generator().manual_seed(5)
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for shape in SHAPES:
        normal = torch.randn(shape, generator=made)
        for scale in (0.02, 1.0, 3e-7, 300.0):
            yield (normal * scale).to(dtype)
        extreme = (normal * 0.02).to(dtype)
        extreme[0] = -0.0
        extreme[-1, 0] = most
        extreme[-1, -1] = -most
        extreme[shape[0] // 2] = least / 4  # subnormal
        yield extreme
        yield torch.zeros(shape, dtype=dtype)
        # Quotients that lie on the middle of two codes.
        yield (torch.randint(-448 * 4, 448 * 4, shape, generator=made) / 4).to(dtype)


def ours(kind: str, weight: torch.Tensor) -> tuple[Bytes, Bytes]:
    return quantise(KINDS[kind], weight, "w")


def assert_equal(found: tuple[Bytes, Bytes], expected: tuple[Bytes, Bytes]) -> None:
    assert np.array_equal(found[1], expected[1])
    assert np.array_equal(found[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_vllms(kind: str, dtype: torch.dtype) -> None:
    for weight in weights(dtype):
        if not KINDS[kind].packed or weight.shape[1] % 4 == 0:
            assert_equal(ours(kind, weight), QUANTISERS[kind](weight))


def test_blocks_equal_vllms_compiled_function() -> None:
    weight = torch.randn((300, 517), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_equal(ours("fp8-block", weight), fp8_block(weight, compiled=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_without_a_code_are_refused_by_name(kind: str, value: float) -> None:
    weight = torch.randn(9, 8)
    weight[7, 2] = value
    with pytest.raises(IntegrityError, match=r"tensor 'layer.q_proj.weight': row 107 holds NaN or infinity"):
        quantise(KINDS[kind], weight, "layer.q_proj.weight", 100)


@pytest.mark.parametrize("kind", KINDS)
def test_bands_alone_equal_the_whole(kind: str) -> None:
    weight = torch.randn((300, 516), generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = KINDS[kind].rows
    whole = ours(kind, weight)
    parts = [ours(kind, weight[at : at + rows]) for at in range(0, 300, rows)]
    for which in (0, 1):
        assert np.array_equal(whole[which], np.concatenate([part[which] for part in parts]))
