"""Keeps weights editable in place on vLLM's CPU build.

After loading, that build packs a copy of each linear layer's weight (int8 codes included), empties the original, and
packs experts in place. Edits would then have no effect, or change the wrong values. Guarantee: after
``keep_weights_in_place``, layers loaded later keep their weights as loaded and compute from them; ``packed_layers``
reports any layer that does not. Results differ from the packed kernels' only by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, linear, silu

_KEPT = "p2pcast_keeps_experts"
_CODES = "p2pcast_keeps_codes"


def keep_weights_in_place() -> None:
    """Make linear layers, embeddings and experts compute from their parameters. Call it before loading the model."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if CPUUnquantizedExperts.apply is _apply_experts:
        return
    pack = utils.dispatch_cpu_unquantized_gemm

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = linear
        else:
            pack(layer, remove_weight)  # convolution kernels need packed weights; ``derived_weights`` reports these

    utils.dispatch_cpu_unquantized_gemm = keep
    CPUUnquantizedExperts.process_weights_after_loading = _keep_experts
    CPUUnquantizedExperts.apply = _apply_experts
    arrange, compute = (
        CPUInt8ScaledMMLinearKernel.process_weights_after_loading,
        CPUInt8ScaledMMLinearKernel.apply_weights,
    )

    def arrange_codes(self: Any, layer: torch.nn.Module) -> None:
        config = self.config
        if config.is_channelwise and config.input_symmetric and not config.is_static_input_scheme:
            setattr(layer, _CODES, True)
        else:
            arrange(self, layer)

    def apply_codes(
        self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _apply_int8(layer, x, bias) if keeps_codes(layer) else compute(self, layer, x, bias)

    CPUInt8ScaledMMLinearKernel.process_weights_after_loading = arrange_codes
    CPUInt8ScaledMMLinearKernel.apply_weights = apply_codes


def _keep_experts(self: Any, layer: torch.nn.Module) -> None:
    setattr(layer, _KEPT, True)


def keeps_experts(module: torch.nn.Module) -> bool:
    """Whether these experts compute from the weights as loaded."""
    return getattr(module, _KEPT, False)


def keeps_codes(module: Any) -> bool:
    """Whether this linear layer computes from its int8 codes and scales as loaded."""
    return getattr(module, _CODES, False)


def _apply_int8(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute like vLLM's kernel: activations become int8, with one scale per token. ``weight``: rows × columns."""
    from vllm import _custom_ops as ops

    codes, scales, _ = ops.scaled_int8_quant(x.reshape(-1, x.shape[-1]).contiguous())
    found = torch._int_mm(codes, layer.weight.t()).float() * scales * layer.weight_scale.t()
    if bias is not None:
        found += bias
    return found.to(x.dtype).view(*x.shape[:-1], -1)


def packed_layers(model: torch.nn.Module) -> list[str]:
    """Names of the modules that compute from a packed copy, which even a reload does not update."""
    packed = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        weight = getattr(module, "weight", None)
        emptied = isinstance(weight, torch.Tensor) and weight.numel() == 0
        taken = method is not None and "weight" in module._parameters and weight is None
        routed = type(method).__name__ == "UnquantizedFusedMoEMethod" and not keeps_experts(module)
        if emptied or taken or routed or getattr(module, "cpu_linear", linear) is not linear:
            packed.append(name)
    return packed


def _apply_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """Replacement for ``CPUUnquantizedExperts.apply``, with the same signature."""
    ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    weights = None if apply_router_weight_on_input else topk_weights  # otherwise the input is already weighted
    experts(output, hidden_states, w1, w2, self.w1_bias, self.w2_bias, weights, ids, activation.value)


@torch.library.custom_op("p2pcast::experts", mutates_args=("output",))  # type: ignore[untyped-decorator]
def experts(
    output: torch.Tensor,
    tokens: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    weights: torch.Tensor | None,
    ids: torch.Tensor,
    activation: str,
) -> None:
    """Write the weighted sum of each token's expert outputs. Custom, because the data decides which experts run.

    ``tokens``, ``output``: tokens × hidden; ``w13``: experts × 2·width × hidden, ``w2``: experts × hidden × width;
    ``weights``, ``ids``: tokens × chosen; a negative id is an expert of a different rank.
    """
    chosen = ids.flatten()
    found = torch.zeros(len(chosen), output.shape[-1], dtype=torch.float32)
    for expert in chosen.unique().tolist():
        if expert >= 0:
            at = (chosen == expert).nonzero().squeeze(1)
            wide = linear(tokens[at // ids.shape[1]], w13[expert], None if w13_bias is None else w13_bias[expert])
            found[at] = linear(
                _gate(wide, activation), w2[expert], None if w2_bias is None else w2_bias[expert]
            ).float()
    found = found.view(*ids.shape, -1)
    output.copy_((found if weights is None else found * weights.unsqueeze(-1)).sum(1))


def _gate(wide: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "swigluoai":  # gpt-oss: gates and ups alternate, both are clamped
        gate, up = wide[..., ::2].clamp(max=7.0), wide[..., 1::2].clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = wide.chunk(2, dim=-1)
    if activation == "silu":
        return silu(gate) * up
    return gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
