"""Names of a training process's tensors, without the parts that module wrappers add. Pure."""

from __future__ import annotations

from typing import Final

WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name that DDP, ``torch.compile``, FSDP and activation checkpointing add."""
_PEFT_LAYER: Final = "base_layer"


def without_wrappers(name: str) -> str:
    """Return the tensor's name in the unwrapped model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def without_adapter_layers(name: str) -> str:
    """Return the tensor's name in a model that PEFT has not wrapped. The prefix of PEFT's model stays."""
    return ".".join(part for part in name.split(".") if part != _PEFT_LAYER)
