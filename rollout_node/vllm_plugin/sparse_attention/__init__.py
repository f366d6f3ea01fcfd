"""Sparse attention inside vLLM: decoded tokens attend only to the best pages of the cache, within a budget.

With ``P2PCAST_SPARSE_ATTENTION=1``, the server's own attention backend is replaced by one that wraps it
(``paged_backend``). It is dense until it gets a budget schedule (``budget_in_use``).
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the backend. Called in each of vLLM's processes, before a model is loaded."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    here = __name__
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{here}.cpu_backend.SparseCPUBackend")
    else:
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{here}.flash_backend.SparseFlashBackend")


def has_layers(model: Any) -> bool:
    """Whether any layer of the model follows the schedule. vLLM may have chosen a different backend, or all layers may
    be dense in any case, such as those with a sliding window.
    """
    from rollout_node.vllm_plugin.sparse_attention.paged_backend import SparseImplementation

    layers = ((getattr(module, "impl", None), module) for module in model.modules())
    return any(isinstance(impl, SparseImplementation) and impl.follows_schedule(layer) for impl, layer in layers)
