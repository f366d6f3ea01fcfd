"""Names in a run whose state is one or several LoRA adapters of one base model, or the model together with adapters.

A matrix is named ``ADAPTER/NAME``, where NAME is its name in PEFT's file. Each adapter has a small file
``ADAPTER/adapter_config.json``. A folder that PEFT saved for a single adapter has no prefix: that adapter's name is
empty. Together with a model, each adapter has a name, and the model's tensors have their usual names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from p2pcast.ground.errors import IntegrityError, UsageError
from p2pcast.ground.limits import MIB

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PEFT_MODEL: Final = "base_model.model."
"""How every name in PEFT's models and files begins."""
MOST_CONFIG_BYTES: Final = MIB
"""Most bytes of one configuration; PEFT writes about 1 KiB, and 100 bytes more for each rank pattern."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)
_TENSOR: Final = re.compile(r"(?:.+\.)?lora_(?:[AB]\.weight|embedding_[AB])", re.DOTALL)


def checked_name(name: str) -> str:
    """Return the name if it is valid for an adapter. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} is no name of an adapter: use up to 64 letters, digits, '.', '_' and '-', the first not '.'"
        )
    return name


def state_name(adapter: str, name: str) -> str:
    """Return the tensor's name in the run, or the small file's path."""
    return f"{adapter}/{name}" if adapter else name


def split_name(name: str) -> tuple[str, str]:
    """Return the adapter, and the tensor's name in PEFT's file."""
    adapter, slash, rest = name.partition("/")
    return (adapter, rest) if slash else ("", name)


def is_adapter_tensor(name: str) -> bool:
    """Whether a name in PEFT's file is that of a LoRA matrix."""
    return _TENSOR.fullmatch(name) is not None


def adapter_of(name: str) -> str | None:
    """Return the adapter of a LoRA matrix in a run's state, which may be empty; None for any other tensor."""
    adapter, rest = split_name(name)
    return adapter if is_adapter_tensor(rest) else None


def adapters_of(names: Collection[str]) -> tuple[str, ...]:
    """Return the adapters of a state with these tensors, sorted; empty if any tensor does not belong to an adapter."""
    found = {adapter_of(name) for name in names}
    return () if None in found else tuple(sorted(name for name in found if name is not None))


def adapters_beside(names: Collection[str]) -> tuple[str, ...]:
    """Return the named adapters of a state that also contains a model, sorted; otherwise empty."""
    found = {adapter_of(name) for name in names}
    return tuple(sorted(name for name in found if name)) if None in found else ()


def adapter_configs(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the configurations among a version's small files. Raises IntegrityError if one is too large."""
    found = {path: contents for path, contents in files.items() if split_name(path)[1] == CONFIG}
    for path, contents in found.items():
        if len(contents) > MOST_CONFIG_BYTES:
            raise IntegrityError(f"{path}: {len(contents)} bytes are over the limit of {MOST_CONFIG_BYTES}")
    return found


def _finite(text: str) -> float:
    """Parse a finite number: an infinite or undefined lora_alpha would make a matrix infinite or undefined."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def configs_of(adapters: Iterable[str], files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Return each adapter's configuration from a version's small files. Raises IntegrityError."""
    out: dict[str, dict[str, Any]] = {}
    for adapter in adapters:
        path = state_name(adapter, CONFIG)
        contents = files.get(path)
        if contents is None:
            raise IntegrityError(f"the version has no {path}: publish the adapter with its configuration")
        try:
            config = json.loads(contents, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            raise IntegrityError(
                f"{path} is not JSON, or has a number that is not finite; save the adapter again"
            ) from None
        if not isinstance(config, dict):
            raise IntegrityError(f"{path} is not a JSON object; save the adapter again")
        out[adapter] = config
    return out
