"""Names of a training process's tensors, without the parts that wrappers of modules add. Pure."""

from __future__ import annotations

from typing import Final

WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name that DDP, ``torch.compile``, FSDP and activation checkpointing add."""
_PEFT_LAYER: Final = "base_layer"


def without_wrappers(name: str) -> str:
    """As a plain model names the tensor."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_adapter_layers(name: str) -> str:
    """As a model names the tensor that PEFT has not wrapped. The prefix of PEFT's model stays."""
    return ".".join(part for part in name.split(".") if part != _PEFT_LAYER)
