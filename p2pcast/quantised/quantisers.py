"""The quantisers: from rows of a weight to codes and scales, bit for bit like vLLM's own quantisers on a CPU.

Guarantee: the result depends only on the values, and a band of rows gives the same codes whether it is quantised by
itself or with others. NaN and infinity are refused, because no code represents them. Only IEEE 754 arithmetic is used:
true division, and rounding to nearest with ties to even.

| kind | scale, in float32 unless stated | code |
|---|---|---|
| fp8-channel | greatest magnitude of the row / 448, at least 1 / (448 · 512) | weight / scale, clamped, as E4M3 |
| fp8-block | greatest magnitude of the block, at least 1e-4, / 448 | weight · (1 / scale), as E4M3 |
| int8-… | greatest magnitude of the row / 127, in the weight's dtype | weight / scale in that dtype, rounded, clamped |

Sources: vLLM 0.32, ``Fp8PtpcOnlineLinearMethod``, ``per_block_cast_to_fp8``, ``Int8OnlineMoEMethod``. The codes of a
row of zeros are zero.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from p2pcast.codec.layout import Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.quantised.quantisation_kinds import QuantisationKind

_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SIGNED: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FP8_MOST: Final = 448.0
_LEAST_SHARE: Final = 512.0
_LEAST_BLOCK: Final = 1e-4
_INT8_MOST: Final = 127
_SIGN: Final = 0x80
"""Packed codes are stored with an offset of 128."""

Bytes = npt.NDArray[np.uint8]


def as_weights(words: npt.NDArray[Any], tensor: Tensor) -> torch.Tensor:
    """Return whole rows of ``tensor`` from their words, without a copy if the words are writeable."""
    room = words if words.flags.writeable else words.copy()
    signed = torch.from_numpy(room.view(f"i{room.itemsize}"))
    return signed.view(_DTYPES[tensor.dtype]).view(-1, tensor.shape[1])


def quantise(kind: QuantisationKind, weights: torch.Tensor, name: str, first_row: int = 0) -> tuple[Bytes, Bytes]:
    """Return (codes, scales) of rows of a weight, as bytes of the quantised tensors.

    ``weights``: rows × columns, in whole bands of ``kind.rows`` rows except at the end of the tensor. ``name`` and
    ``first_row`` are for messages. Raises IntegrityError.
    """
    with torch.inference_mode():
        if not bool(torch.isfinite(weights).all()):
            row = first_row + int((~torch.isfinite(weights)).any(1).nonzero()[0])
            raise IntegrityError(
                f"tensor {name!r}: row {row} holds NaN or infinity, which {kind.name} cannot hold; look at the "
                "trainer: this version is not usable unquantised either"
            )
        if kind.name == "fp8-block":
            codes, scales = _fp8_blocks(weights, kind.rows)
        elif kind.codes == "F8_E4M3":
            codes, scales = _fp8_rows(weights)
        else:
            codes, scales = _int8_rows(weights)
        scales = scales if kind.packed else scales.float()
        out = _bytes(codes)
        return out ^ np.uint8(_SIGN) if kind.packed else out, _bytes(scales)


def _greatest(weights: torch.Tensor) -> torch.Tensor:
    low, high = weights.aminmax(dim=1, keepdim=True)
    return torch.maximum(low.abs(), high.abs())


def _fp8_rows(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most = torch.tensor(_FP8_MOST, dtype=torch.float32)
    scales = (_greatest(weights).float() / most).clamp_min(1.0 / (most * _LEAST_SHARE))
    return (weights / scales).clamp_(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn), scales


def _fp8_blocks(weights: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weights.shape
    tall, wide = -(-rows // side), -(-columns // side)
    padded = weights
    if (rows, columns) != (tall * side, wide * side):
        padded = weights.new_zeros(tall * side, wide * side)
        padded[:rows, :columns] = weights
    blocks = padded.view(tall, side, wide, side)
    greatest = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(_LEAST_BLOCK)
    scales = greatest / torch.tensor(_FP8_MOST, dtype=torch.float32)
    codes = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(tall * side, wide * side)
    return codes[:rows, :columns], scales.view(tall, wide)


def _int8_rows(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _greatest(weights) / _INT8_MOST
    quotients = weights.div(scales).round_().clamp_(-_INT8_MOST, _INT8_MOST)
    # Zero divided by zero is NaN, whose conversion to an integer differs between processors.
    return quotients.nan_to_num_(0.0).to(torch.int8), scales


def _bytes(tensor: torch.Tensor) -> Bytes:
    row = tensor.contiguous().view(_SIGNED[tensor.element_size()]).reshape(-1)
    found: Bytes = row.numpy().view(np.uint8)
    return found
