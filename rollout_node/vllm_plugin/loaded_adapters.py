"""Notes which adapters a vLLM worker has loaded, under which ids, and keeps a run's adapters from their folders.

vLLM drops an adapter from its host cache when others need the room, and reads it again from its folder at the next
request. The folder holds old weights. Promise: once p2pcast has installed an adapter, each load of that name, whatever
its id and folder, gives the installed matrices.

Imported before a model is loaded: no module with numba may be imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from typing import Any

_INSTALLED = "_p2pcast"
_NOTES = "p2pcast_loaded_adapters"


@dataclass(slots=True)
class LoadedAdapters:
    """``ids``: vLLM's ids of each name; a name that is unloaded and loaded again gets another. ``kept``: the matrices
    that p2pcast installed, as vLLM's ``LoRAModel``.
    """

    ids: dict[str, set[int]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


def loaded_adapters(manager: Any) -> LoadedAdapters:
    """Of one of vLLM's ``LoRAModelManager``."""
    found: LoadedAdapters = manager.__dict__.setdefault(_NOTES, LoadedAdapters())
    return found


def keep_installed_adapters() -> None:
    """Wrap the method with which vLLM's ranks load an adapter."""
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
