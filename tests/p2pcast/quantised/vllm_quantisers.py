"""vLLM's own quantisers on this CPU: codes and scales of one weight, as bytes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


def bits(tensor: torch.Tensor) -> Bytes:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def fp8_channel(weight: torch.Tensor) -> tuple[Bytes, Bytes]:
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    scales = fp8._fp8_channel_scale(weight_amax(weight, dim=-1, keepdim=True))
    return bits(fp8._fp8_quant_per_channel(weight, scales)), bits(scales)


def fp8_block(weight: torch.Tensor, *, compiled: bool = False) -> tuple[Bytes, Bytes]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    quantise = per_block_cast_to_fp8 if compiled else per_block_cast_to_fp8._torchdynamo_orig_callable
    codes, scales = quantise(weight, [128, 128], False)
    return bits(codes), bits(scales)


class _Experts(torch.nn.Module):
    """The parts of vLLM's layer of experts that its quantiser reads."""

    num_experts = local_num_experts = 1

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        for name in ("w13_weight", "w2_weight"):
            self.register_parameter(name, torch.nn.Parameter(weight.clone()[None], requires_grad=False))


def int8_channel(weight: torch.Tensor) -> tuple[Bytes, Bytes]:
    """By vLLM's only quantiser of int8 weights, which quantises experts."""
    from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod

    layer = _Experts(weight)
    Int8OnlineMoEMethod._quantize_weights(SimpleNamespace(moe=SimpleNamespace(tp_size=1)), layer)
    codes, scales = bits(layer.w13_weight), bits(layer.w13_scale)
    assert np.array_equal(codes, bits(layer.w2_weight))
    assert np.array_equal(scales, bits(layer.w2_scale))
    return codes, scales


def int8_weight_only(weight: torch.Tensor) -> tuple[Bytes, Bytes]:
    """int8-channel, packed by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized import pack_to_int32

    codes, scales = int8_channel(weight)
    packed = pack_to_int32(torch.from_numpy(codes.view(np.int8)).view(weight.shape), 8)
    return bits(packed), bits(torch.from_numpy(scales).view(torch.float32).to(weight.dtype))


QUANTISERS = {
    "fp8-channel": fp8_channel,
    "fp8-block": fp8_block,
    "int8-channel": int8_channel,
    "int8-weight-only": int8_weight_only,
}
