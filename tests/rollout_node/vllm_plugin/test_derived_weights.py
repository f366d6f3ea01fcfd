"""Which layers hold weights in an arrangement of their own, found without vLLM, by the names of its classes."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from rollout_node.vllm_plugin import cpu_weights
from rollout_node.vllm_plugin.derived_weights import derived_parts


def test_plugin_loads_nothing_in_other_vllm_servers() -> None:
    script = (
        "import sys; from rollout_node.vllm_plugin import register; register(); "
        "print(sorted({'torch', 'vllm', 'numba', 'numpy'} & set(sys.modules)))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "P2PCAST_SOCK"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr


class Packed(torch.nn.Module):
    """Stands for vLLM's layers, with their ``quant_method`` and hooks."""

    def __init__(self, method: str | None = None, hook: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(0 if method == "empty" else 2), requires_grad=False)
        if method:
            self.quant_method = type(method, (), {})()
        if hook:
            self.process_weights_after_loading = lambda: None


def test_parts_with_derived_weights_are_found() -> None:
    model = torch.nn.Module()
    model.plain = Packed("UnquantizedLinearMethod")
    assert derived_parts(model) == []
    model.fp8 = Packed("Fp8LinearMethod")
    model.mla = Packed(hook=True)
    model.experts = Packed("UnquantizedFusedMoEMethod")
    assert [line.split(":")[0] for line in derived_parts(model)] == ["fp8", "mla", "experts"]


class QuantizeMethodBase:
    """vLLM's class by name: a method that is a module is not a part with weights."""

    def process_weights_after_loading(self) -> None: ...


class UnquantizedFusedMoEMethod(torch.nn.Module, QuantizeMethodBase):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.unquantized_backend = type("Backend", (), {"name": backend})()


def test_experts_in_checkpoint_arrangement_are_not_derived() -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    for backend, plain in (("TRITON", True), ("FLASHINFER_CUTLASS", False), ("CPU", False)):
        model.experts.quant_method = UnquantizedFusedMoEMethod(backend)
        assert (derived_parts(model) == []) == plain
    cpu_weights._keep_experts(None, model.experts)
    assert derived_parts(model) == cpu_weights.packed_layers(model) == []


def test_packed_cpu_layers_are_found() -> None:
    model = torch.nn.Module()
    model.plain = Packed()
    model.plain.cpu_linear = torch.nn.functional.linear
    assert cpu_weights.packed_layers(model) == []
    model.emptied = Packed("empty")
    model.kept = Packed()
    model.kept.cpu_linear = print
    model.taken = Packed("CompressedTensorsLinearMethod")
    model.taken.weight = None
    model.experts = Packed("UnquantizedFusedMoEMethod")
    assert cpu_weights.packed_layers(model) == ["emptied", "kept", "taken", "experts"]
