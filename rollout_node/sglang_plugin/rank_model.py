"""One rank's model in SGLang, in the form that ``in_engine.rank_installer`` needs.

Guarantee: anything unknown counts as derived. A model that computes from anything except the loaded weights is refused,
because SGLang cannot reload it in place.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from p2pcast.ground.errors import LocalError
from rollout_node.in_engine.adapter_weights import AdapterWeights, Followers
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.started_settings import StartedSettings

log = logging.getLogger("sglang.p2pcast")

_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
_PERMUTING = ("w13_swiglu_interleaved", "use_flashinfer_trtllm_moe")
"""Flags of the experts' method, for kernels whose rows SGLang permutes after loading."""


class SglangRankModel:
    """The model of the scheduler to which this weight updater belongs."""

    def __init__(self, updater: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel, runner = get_parallel(), updater.tp_worker.model_runner
        self.model: torch.nn.Module = runner.model
        self.settings = StartedSettings(type(runner.model_config.hf_config), runner.model_config.model_path, log)
        self.device = next(self.model.parameters()).device
        self.rank = int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
        self.ranks = int(parallel.tp_size * parallel.pp_size)

    use_schedule: None = None
    takes_adapters = False

    def loading_form(self) -> AbstractContextManager[None]:
        return nullcontext()

    def loading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def derived_parts(self) -> list[str]:
        """Return an empty list, or raise LocalError: a model with derived parts is refused."""
        from sglang.srt.runtime_context import get_exec

        if get_exec().moe.enable_eplb:
            raise LocalError("SGLang moves experts between ranks while it runs: start it without --enable-eplb")
        if callable(getattr(self.model, "post_load_weights", None)):
            raise LocalError(f"{type(self.model).__name__} derives matrices from its weights after loading; {_REFUSED}")
        for name, module in self.model.named_modules():
            if (reason := _derivation(module)) is not None:
                raise LocalError(f"{name}: {reason}; {_REFUSED}")
        return []

    def followers(self, weights: AdapterWeights) -> Followers:
        raise LocalError("the run has LoRA adapters: p2pcast installs adapters into vLLM, and into no SGLang server")

    def reload_all(self, shadow: ShadowReader) -> None:
        raise LocalError(_REFUSED)


_REFUSED = "p2pcast installs into SGLang's unquantised models alone"


def _derivation(module: Any) -> str | None:
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in _PLAIN_METHODS:
        return f"weights processed by {type(method).__name__}"
    if getattr(module, "use_intel_amx_backend", False):
        return "weights packed for the CPU's matrix unit"
    if type(method).__name__ == "UnquantizedFusedMoEMethod" and _permutes(method):
        return "experts in an order of their kernel's own"
    return None


def _permutes(method: Any) -> bool:
    """Whether SGLang permutes the experts' rows. Unknown counts as yes: a later release may do it for more kernels."""
    from sglang.srt.layers.quantization import unquant

    return any(getattr(method, flag, True) for flag in _PERMUTING) or any(
        getattr(unquant, platform, True) for platform in ("_use_aiter", "_is_npu")
    )
