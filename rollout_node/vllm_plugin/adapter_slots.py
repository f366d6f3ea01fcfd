"""vLLM's copies of a run's adapters: its host cache, and the slots of its LoRA layers.

A slot is one adapter's place in a layer's stacked matrices, from which all requests for that adapter compute.
Guarantee: ``follow`` writes into this storage in place. No address, name or id changes, so CUDA graphs and requests
stay valid. It casts and scales as vLLM's own loader does, bit for bit. Each slot and cached matrix is read back.

Under tensor parallelism, each rank has whole matrices in its cache and its own share of them in its slots, cut by
vLLM's own rule (``share_of_rank``).

Fully sharded LoRA, and layers other than plain linear ones, are refused because no proof covers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.layers import (
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.utils.torch_utils import PIN_MEMORY

from p2pcast.checkpoint.adapter_form import configs_of, split_name
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from rollout_node.in_engine.adapter_weights import AdapterConfigs, AdapterWeights
from rollout_node.in_engine.loader_rehearsal import WORDS
from rollout_node.vllm_plugin.loaded_adapters import loaded_adapters

_PLAIN_LAYERS = frozenset(
    {
        "ReplicatedLinearWithLoRA",
        "ColumnParallelLinearWithLoRA",
        "RowParallelLinearWithLoRA",
        "MergedColumnParallelLinearWithLoRA",
        "QKVParallelLinearWithLoRA",
        "MergedQKVParallelLinearWithLoRA",
    }
)
"""Layers whose slots hold an adapter's matrices unchanged, starting at the first row and column."""
_MOST_NAMES = 8
"""Number of loaded adapters named in an error."""
_START = "start it with --enable-lora --max-lora-rank RANK --lora-modules NAME=FOLDER"


@dataclass(frozen=True, slots=True)
class _Copy:
    """The copies of tensor ``number``, which is matrix A or B of part ``part`` of ``layer``."""

    number: int
    adapter: str
    peft_name: str
    layer: Any
    weights: Any
    part: int
    is_a: bool

    @property
    def cached(self) -> torch.Tensor:
        """The matrix in vLLM's host cache, which vLLM may replace by a copy in pinned memory."""
        found = self.weights.lora_a if self.is_a else self.weights.lora_b
        tensor: torch.Tensor = found[self.part] if isinstance(found, list) else found
        return tensor

    def stacked(self, slot: int) -> torch.Tensor:
        """The slot, with space for the largest rank."""
        found: torch.Tensor = (self.layer.lora_a_stacked if self.is_a else self.layer.lora_b_stacked)[self.part]
        return found[slot, 0]

    @property
    def shared(self) -> torch.Tensor:
        """This rank's share of the cached matrix, as held in a slot."""
        return share_of_rank(self.layer, self.part, self.cached, is_a=self.is_a)

    def in_slot(self, slot: int, share: torch.Tensor) -> torch.Tensor:
        rows, columns = share.shape
        return self.stacked(slot)[:rows, :columns]


class AdapterSlots:
    """``Followers`` of ``weights`` in one rank's model. Raises LocalError if these adapters cannot be installed."""

    def __init__(self, model: Any, weights: AdapterWeights) -> None:
        manager = getattr(model, "lora_manager", None)
        if manager is None:
            raise LocalError(f"the run has LoRA adapters, and this server takes none: {_START}")
        if manager.lora_config.fully_sharded_loras:
            raise LocalError("start the server without --fully-sharded-loras: p2pcast cannot install into its slots")
        self._manager, self._notes = manager, loaded_adapters(manager)
        self._dtype: torch.dtype = manager.lora_config.lora_dtype
        self._weights = weights
        self._names = {name: self._name_here(name) for name in weights.adapters}
        if len(self._names) > manager.capacity:
            raise LocalError(
                f"the run has {len(self._names)} adapters, and the server keeps {manager.capacity}: start it with"
                f" --max-cpu-loras {len(self._names)} or more"
            )
        self._loras: dict[str, dict[str, Any]] = {name: {} for name in self._names}
        """Adapter → its matrices, by vLLM's name of the layer."""
        self._copies = [self._copy(number, name) for number, name in weights.names.items()]
        self._require_pairs()
        self._scales = dict.fromkeys(weights.names, 1.0)

    # -- Followers

    def settings(self, source: AdapterConfigs, version: Version) -> dict[int, float]:
        """Return the scale of each matrix, by tensor number."""
        helpers: dict[str, PEFTHelper] = {}
        for name, config in configs_of(self._names, source.adapter_configs(version)).items():
            try:
                helpers[name] = PEFTHelper.from_dict(config)
                helpers[name].validate_legal(self._manager.lora_config)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise LocalError(f"vLLM cannot serve adapter {self._names[name]} of {version}: {error}") from None
        return {copy.number: self._scale(copy, helpers[copy.adapter]) for copy in self._copies}

    def follow(self, settings: dict[int, float]) -> None:
        self._scales = settings
        with torch.inference_mode():
            for copy in self._copies:
                copy.cached.copy_(self._weights.numbered[copy.number])
                if settings[copy.number] != 1:
                    copy.cached.mul_(settings[copy.number])
            self._take_over()
            for copy, slot in self._in_use():
                share = copy.shared
                copy.in_slot(slot, share).copy_(share, non_blocking=True)
            for copy, slot in self._in_use():
                share = copy.shared
                if not _equal(copy.in_slot(slot, share), share):
                    raise IntegrityError(f"{copy.peft_name}: its values were not written to slot {slot}")

    def differing(self) -> list[int]:
        found = set()
        with torch.inference_mode():
            for copy in self._copies:
                expected = self._weights.numbered[copy.number].to(self._dtype, copy=True)
                if self._scales[copy.number] != 1:
                    expected.mul_(self._scales[copy.number])
                if not _equal(copy.cached, expected):
                    found.add(copy.number)
            for copy, slot in self._in_use():
                stacked, share = copy.stacked(slot), copy.shared
                rows, columns = share.shape
                beside = bool(stacked[rows:].any()) or bool(stacked[:rows, columns:].any())
                if beside or not _equal(copy.in_slot(slot, share), share):
                    found.add(copy.number)
            found |= self._foreign()
        return sorted(found)

    # -- the parts

    def _name_here(self, name: str) -> str:
        """The name under which vLLM loaded the adapter."""
        loaded = sorted(self._notes.ids)
        if name in loaded:
            return name
        if not name and len(loaded) == 1:
            return loaded[0]
        there = ", ".join(loaded[:_MOST_NAMES]) + (" and more" if len(loaded) > _MOST_NAMES else "") or "none"
        if name:
            raise LocalError(f"the server has no adapter {name} (it has {there}): {_START}")
        raise LocalError(f"the run's adapter has no name, and the server has {there}: {_START}, once")

    def _copy(self, number: int, name: str) -> _Copy:
        adapter, peft_name = split_name(name)
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        try:
            module, is_a = parse_fine_tuned_lora_name(peft_name, mapper and mapper.get_rename_mapper())
        except ValueError as error:
            raise LocalError(f"{name}: vLLM cannot place this tensor: {error}") from None
        packed = {
            part: (whole, i) for whole, parts in self._manager.packed_modules.items() for i, part in enumerate(parts)
        }
        layer_name, part = packed.get(module, (module, 0))
        layer = self._manager.modules.get(layer_name)
        kind = type(layer).__name__
        if layer is None or kind not in _PLAIN_LAYERS:
            raise LocalError(
                f"{name}: vLLM has {'no LoRA layer' if layer is None else kind} there, and p2pcast installs adapters of"
                " plain linear layers alone: train adapters of these"
            )
        parts = len(self._manager.packed_modules.get(layer_name, [layer_name]))
        if layer.n_slices != parts:
            raise LocalError(f"{name}: vLLM divides {layer_name} into {layer.n_slices} parts, the adapter into {parts}")
        shape = tuple(self._weights.numbered[number].shape)
        wanted = whole_size(layer, part, is_a=is_a)
        if len(shape) != 2 or shape[1 if is_a else 0] != wanted:
            raise LocalError(f"{name}: {list(shape)} does not fit the layer, which takes {wanted} values for each row")
        stacked = (layer.lora_a_stacked if is_a else layer.lora_b_stacked)[part]
        rank, largest = (shape[0], stacked.shape[2]) if is_a else (shape[1], stacked.shape[3])
        if rank > largest:
            raise LocalError(f"{name} has rank {rank}: start the server with --max-lora-rank {rank} or more")
        matrix = torch.zeros(shape, dtype=self._dtype, pin_memory=PIN_MEMORY)
        weights = self._matrices(adapter, layer_name, parts, rank)
        matrices = weights.lora_a if is_a else weights.lora_b
        if parts > 1:
            matrices[part] = matrix
        elif is_a:
            weights.lora_a = matrix
        else:
            weights.lora_b = matrix
        return _Copy(number, adapter, peft_name, layer, weights, part, is_a)

    def _matrices(self, adapter: str, layer: str, parts: int, rank: int) -> Any:
        """Return vLLM's record of the adapter's matrices at a layer, already scaled."""
        known = self._loras[adapter]
        if layer not in known and parts > 1:
            none: list[Any] = [None] * parts
            known[layer] = PackedLoRALayerWeights(layer, rank, [*none], [*none], [*none], scaling=[1] * parts)
        elif layer not in known:
            known[layer] = LoRALayerWeights(layer, rank, rank, None, None, scaling=1)
        return known[layer]

    def _require_pairs(self) -> None:
        """Raises LocalError unless both matrices of each part are present and have the same rank."""
        pairs: dict[tuple[str, int, int], dict[bool, _Copy]] = {}
        for copy in self._copies:
            pair = pairs.setdefault((copy.adapter, id(copy.layer), copy.part), {})
            if copy.is_a in pair:
                raise LocalError(f"{copy.peft_name} and {pair[copy.is_a].peft_name} have one place in vLLM")
            pair[copy.is_a] = copy
        for pair in pairs.values():
            one = next(iter(pair.values()))
            if len(pair) < 2 or pair[True].cached.shape[0] != pair[False].cached.shape[1]:
                raise LocalError(f"{one.peft_name}: its other matrix is missing, or has another rank")

    def _scale(self, copy: _Copy, helper: PEFTHelper) -> float:
        module, _ = parse_fine_tuned_lora_name(copy.peft_name)
        rank, scale = helper.get_rank_and_scaling(module)
        found = copy.cached.shape[0 if copy.is_a else 1]
        if found != rank:
            raise IntegrityError(f"{copy.peft_name} has rank {found}, and its configuration says {rank}")
        return 1.0 if copy.is_a else float(scale)

    def _take_over(self) -> None:
        """Put the matrices into vLLM's cache, replacing those from the adapter's folder."""
        for adapter, name in self._names.items():
            for number in self._notes.ids[name]:
                held = self._manager._registered_adapters.cache.get(number)
                if held is None or self._is_ours(held, adapter):
                    continue
                self._manager._registered_adapters[number] = self._model(adapter, number)
                for slot in self._slots(number):
                    for layer in self._manager.modules.values():
                        layer.reset_lora(slot)
            self._notes.kept[name] = self._model(adapter, min(self._notes.ids[name]))

    def _model(self, adapter: str, number: int) -> LoRAModel:
        loras = self._loras[adapter]
        return LoRAModel(number, max(w.rank for w in loras.values()), loras)

    def _is_ours(self, held: Any, adapter: str) -> bool:
        ours = self._loras[adapter]
        return held.loras.keys() == ours.keys() and all(held.loras[layer] is ours[layer] for layer in ours)

    def _slots(self, number: int) -> list[int]:
        return [slot for slot, held in enumerate(self._manager.lora_index_to_id) if held == number]

    def _in_use(self) -> Iterator[tuple[_Copy, int]]:
        """Yield each copy with each slot that its adapter currently has."""
        for copy in self._copies:
            for number in self._notes.ids[self._names[copy.adapter]]:
                for slot in self._slots(number):
                    yield copy, slot

    def _foreign(self) -> set[int]:
        """One tensor of each adapter for which vLLM holds different matrices, or applies matrices at further layers."""
        found = set()
        for adapter, name in self._names.items():
            first = next(copy.number for copy in self._copies if copy.adapter == adapter)
            for number in self._notes.ids[name]:
                held = self._manager._registered_adapters.cache.get(number)
                if held is not None and not self._is_ours(held, adapter):
                    found.add(first)
                for slot in self._slots(number):
                    if any(
                        self._is_used(layer, slot)
                        for n, layer in self._manager.modules.items()
                        if n not in self._loras[adapter]
                    ):
                        found.add(first)
        return found

    @staticmethod
    def _is_used(layer: Any, slot: int) -> bool:
        stacked = layer.lora_b_stacked
        return any(bool(t[slot].any()) for t in (stacked if isinstance(stacked, tuple | list) else [stacked]))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two hold the same bits."""
    words = WORDS[one.element_size()]
    return bool(torch.equal(one.contiguous().view(words), other.to(one.device).contiguous().view(words)))


def share_of_rank(layer: Any, part: int, matrix: torch.Tensor, *, is_a: bool) -> torch.Tensor:
    """Return this rank's share of A (rank, columns) or B (rows, rank) of part ``part`` of one of vLLM's plain linear
    LoRA layers. The result is a view if the share is one range.

    A rank of a column-parallel layer has rows of B, and a rank of a row-parallel layer columns of A. The other matrix
    is whole on each rank. Several ranks may have the same key and value heads. Guarantee: the shares are cut by the
    methods of vLLM's own layers.
    """
    found = matrix
    if layer.tp_size > 1:
        cut = layer.slice_lora_a if is_a else layer.slice_lora_b
        if isinstance(layer, MergedColumnParallelLinearWithLoRA):
            found = cut([matrix if n == part else None for n in range(layer.n_slices)])[part]
        else:
            found = cut(matrix)
    return found


def whole_size(layer: Any, part: int, *, is_a: bool) -> int:
    """Columns of A or rows of B, over all ranks."""
    base = layer.base_layer
    if is_a:
        return int(base.input_size)
    if isinstance(layer, QKVParallelLinearWithLoRA | MergedQKVParallelLinearWithLoRA):
        # vLLM's output sizes count a key head once for each rank that has it.
        heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        rows = [base.head_size * count for count in heads]
        return rows[part] if layer.n_slices > 1 else sum(rows)
    if isinstance(layer, MergedColumnParallelLinearWithLoRA):
        return int(base.output_sizes[part])
    return int(base.output_size)
