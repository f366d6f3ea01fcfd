"""The weight transfer engine in vLLM's ranks, which passes vLLM's commands to this rank's installer.

The commands are bodies of ``/update_weights``: see ``rollout_node.in_engine.rank_installer``. No error reaches vLLM.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers import BaseLayerWithLoRA

from p2pcast.ground.errors import LocalError
from p2pcast.sparse.budget_schedule import BudgetSchedule
from rollout_node.in_engine.adapter_weights import AdapterWeights
from rollout_node.in_engine.rank_installer import Command, Introduction, RankInstaller
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.started_settings import StartedSettings
from rollout_node.vllm_plugin import (
    SOCKET_VARIABLE,
    SPARSE_VARIABLE,
    cpu_repairs,
    cpu_weights,
    derived_weights,
    quantised_layers,
    sparse_attention,
)
from rollout_node.vllm_plugin.adapter_slots import AdapterSlots
from rollout_node.vllm_plugin.sparse_attention import budget_in_use

log = logging.getLogger("vllm.p2pcast")


@dataclass
class P2PCastInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Fields of ``Introduction``. ``core`` is set by the engine core, not by the peer."""

    engine: str = ""
    run: str = ""
    nonce: str = ""
    forget: bool = False
    pausing: bool = False
    core: bool = False


@dataclass
class P2PCastUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Fields of ``Command``."""

    phase: str = ""
    version: str = ""
    nonce: str = ""
    whole: bool = False


class VllmRankModel:
    """The ``RankModel`` of a vLLM rank."""

    def __init__(self, vllm_config: Any, model_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self._vllm_config, self._model_config = vllm_config, model_config
        self.device, self._served = device, model
        self.model = without_lora_layers(model)
        folder = getattr(model_config, "hf_config_path", None) or model_config.model
        self.settings = StartedSettings(type(model_config.hf_config), folder, log)
        parallel = vllm_config.parallel_config
        self.rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.ranks = parallel.world_size * parallel.data_parallel_size
        self.use_schedule: Callable[[BudgetSchedule | None], None] | None = (
            budget_in_use.use if sparse_attention.has_layers(model) else None
        )
        if os.environ.get(SPARSE_VARIABLE) == "1" and self.use_schedule is None:
            log.warning("no layer of this rank follows schedules of sparse attention: its attention is dense")

    @property
    def takes_adapters(self) -> bool:
        return getattr(self._served, "lora_manager", None) is not None

    def loading(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = set_current_vllm_config(self._vllm_config)
        return context

    def loading_form(self) -> AbstractContextManager[None]:
        return quantised_layers.loading_form(self.model)

    def derived_parts(self) -> list[str]:
        if self.device.type == "cpu" and (packed := cpu_weights.packed_layers(self.model)):
            raise LocalError(
                f"{len(packed)} layers, first {packed[0]}, compute from packed copies of their weights; "
                f"set {SOCKET_VARIABLE} before the server starts "
                "(int8 weights whose activations have fixed scales are packed in any case)"
            )
        with self.loading():
            found = derived_weights.derived_parts(self.model)
        if found and self.takes_adapters:
            raise LocalError(
                f"{found[0]}, so p2pcast loads this model as a whole, and it does so without --enable-lora alone"
            )
        return found

    def followers(self, weights: AdapterWeights) -> AdapterSlots:
        parallel = self._vllm_config.parallel_config
        if self.ranks != parallel.tensor_parallel_size:
            raise LocalError(
                f"the run has LoRA adapters, and this engine has {self.ranks} ranks, {parallel.tensor_parallel_size} of"
                " them by tensor parallelism: p2pcast installs adapters into engines with tensor parallelism alone"
            )
        return AdapterSlots(self._served, weights)

    def reload_all(self, shadow: ShadowReader) -> None:
        derived_weights.reload_all(shadow, self.model, self._model_config)


class P2PCastEngine(WeightTransferEngine[P2PCastInitInfo, P2PCastUpdateInfo]):  # type: ignore[misc]
    init_info_cls = P2PCastInitInfo
    update_info_cls = P2PCastUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            from vllm.v1.worker.cpu_model_runner import CPUModelRunner

            cpu_repairs.keep_generators(CPUModelRunner)
            if getattr(model, "lora_manager", None) is not None:
                from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

                cpu_repairs.repair_lora(PunicaWrapperCPU)
        rank_model = VllmRankModel(vllm_config, self.model_config, device, model)
        self._installer = RankInstaller(rank_model, Path(os.environ.get(SOCKET_VARIABLE, "")), log)

    def init_transfer_engine(self, init_info: P2PCastInitInfo) -> None:
        """Introduce a peer. vLLM may call this again at any time."""
        self._installer.introduce(Introduction(**asdict(init_info)))

    def start_weight_update(self) -> None:
        self._installer.begin()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Execute a command. Replaces the base class's method, which raises on bad input and synchronises an
        accelerator that may not exist.
        """
        self._installer.obey(Command.read(update_info))

    def receive_weights(self, update_info: P2PCastUpdateInfo) -> None:
        self._installer.obey(Command(**asdict(update_info)))

    @property
    def held(self) -> str | None:
        """The version from which this rank computes, for the engine core."""
        return self._installer.serves

    def commit_here(self, version: str, nonce: str) -> dict[str, Any] | None:
        """Commit, for the engine core."""
        return self._installer.commit_here(version, nonce)

    def settle_here(self) -> None:
        """Make the commit permanent, for the engine core."""
        self._installer.settle()

    def finish_weight_update(self) -> None:
        self._installer.finish()

    def shutdown(self) -> None:
        self._installer.close()


def without_lora_layers(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model for its loader, with each LoRA layer replaced by the layer inside it; the same model if it has
    none.

    With ``--enable-lora``, vLLM wraps each linear layer after loading. The parameters' names (``….base_layer.weight``)
    then differ from those that the model's loader expects. Guarantee: the result shares every parameter and buffer with
    the served model, which does not change, so a loader may be recorded and rehearsed while the engine computes.
    """
    return _unwrapped(model, {})


def _unwrapped(module: torch.nn.Module, known: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    if module in known:
        return known[module]
    if isinstance(module, BaseLayerWithLoRA):
        found = _unwrapped(module.base_layer, known)
    else:
        parts = {n: None if part is None else _unwrapped(part, known) for n, part in module._modules.items()}
        found = module
        if any(parts[name] is not part for name, part in module._modules.items()):
            # The parameter and buffer dictionaries are shared, so a parameter that vLLM rebinds is found here too.
            found = object.__new__(type(module))
            vars(found).update(vars(module), _modules=parts)
    known[module] = found
    return found
