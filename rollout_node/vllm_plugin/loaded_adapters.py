"""Notes which adapters a vLLM rank has loaded, and under which ids, and makes reloads use a run's installed adapters.

vLLM evicts an adapter from its host cache when others need the space, and reads it again from its folder, which has old
weights, at the next request. Guarantee: once p2pcast has installed an adapter, each load of that name, whatever its id
and folder, yields the installed matrices.

This module is imported before a model is loaded, so it must not import anything that loads numba.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from typing import Any

_INSTALLED = "_p2pcast"
_NOTES = "p2pcast_loaded_adapters"


@dataclass(slots=True)
class LoadedAdapters:
    """``ids``: vLLM's ids for each name, because a name gets a new id when it is loaded again. ``kept``: the matrices
    installed by p2pcast, as vLLM's ``LoRAModel``.
    """

    ids: dict[str, set[int]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


def loaded_adapters(manager: Any) -> LoadedAdapters:
    """Return the notes on one ``LoRAModelManager`` of vLLM."""
    found: LoadedAdapters = manager.__dict__.setdefault(_NOTES, LoadedAdapters())
    return found


def keep_installed_adapters() -> None:
    """Wrap the method by which vLLM's ranks load an adapter."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = WorkerLoRAManager._load_adapter
    if hasattr(load, _INSTALLED):
        return

    @wraps(load)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        notes = loaded_adapters(self._adapter_manager)
        name, number = lora_request.lora_name, lora_request.lora_int_id
        kept = notes.kept.get(name)
        found = load(self, lora_request) if kept is None else kept.clone(number)
        notes.ids.setdefault(name, set()).add(number)
        return found

    setattr(load_adapter, _INSTALLED, True)
    WorkerLoRAManager._load_adapter = load_adapter
