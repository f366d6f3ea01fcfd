"""Sharded loading of a Hugging Face folder's model, for FSDP2. Each rank reads its rows of each tensor.

The model is built without memory (device ``meta``), sharded, and then filled: no rank ever holds a whole tensor, and
memory for weights is that of the rank's share. Buffers that a folder does not store, such as tables of rotary
embeddings, are computed by transformers' own initialisation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.ground.errors import LocalError, P2PCastError, UsageError
from trainer_node.learning.stored_tensors import RowBlock, blocks, local_part
from trainer_node.learning.trainer_ranks import TrainerRanks


def sharded(checkpoint: Checkpoint, dtype: torch.dtype, ranks: TrainerRanks) -> Any:
    """The model with parameters of ``dtype``. All ranks call. Raises LocalError for a folder that transformers cannot
    load, UsageError for a model that cannot be published, or that the ranks do not divide.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = checkpoint.folder
    with loading(folder):
        # Only a local folder: nothing is asked of a model hub.
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config))
        held = [tensor.name for tensor in checkpoint.layout().tensors]
        fused = blocks(module, held)
        with _Stored(checkpoint) as stored:
            _make_buffers(module, stored, ranks.device)
            _shard(module, ranks.mesh, {block.parameter for block in fused.values()})
            _fill(module, stored, fused, ranks.device)
    return module


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Turns errors of transformers into a LocalError."""
    try:
        yield
    except P2PCastError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers raises errors of many kinds
        raise LocalError(f"transformers cannot load {folder}: {type(error).__name__}: {str(error)[:300]}") from None


def attention_of(config: Any) -> str | None:
    """Name of the attention function in transformers; None: the default one. The default leaves out the bound of Gemma
    2's attention scores, which engines apply.
    """
    return None if getattr(config.get_text_config(), "attn_logit_softcapping", None) is None else "eager"


def _make_buffers(module: Any, stored: _Stored, device: torch.device) -> None:
    """Buffers are whole on each rank: read if the folder has them, otherwise computed. Raises LocalError for a buffer
    that is neither stored nor computed.
    """
    for path, part in module.named_modules():
        for name in [name for name, buffer in part._buffers.items() if buffer is not None]:
            key = f"{path}.{name}" if path else name
            part._buffers[name] = (
                stored.whole(key).to(device, copy=True) if key in stored else _computed(module, part, key, device)
            )


def _computed(module: Any, part: Any, key: str, device: torch.device) -> torch.Tensor:
    """As transformers initialises the buffer of ``part`` when it loads a model."""
    name = key.rpartition(".")[2]
    found = []
    for before in (0, 1):
        part._buffers[name] = torch.full_like(part._buffers[name], before, device=device)
        # The parameters have no memory yet, so that only buffers are initialised.
        module._init_weights(part)
        found.append(part._buffers[name])
    if not torch.equal(*found):
        raise LocalError(f"the model has a buffer {key} that its folder does not store, and transformers not compute")
    return found[0]


def _shard(module: Any, mesh: Any, fused: Collection[str]) -> None:
    """FSDP2: each decoder layer is gathered while it computes. ``fused``: parameters with several stored tensors, which
    are sharded by their last dimension: each rank then has columns of each stored tensor. Raises UsageError for a last
    dimension that the ranks do not divide.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    by_columns, named = {}, dict(module.named_parameters())
    for name, parameter in named.items():
        if name in fused:
            if parameter.shape[-1] % mesh.size():
                raise UsageError(f"{mesh.size()} ranks do not divide the {parameter.shape[-1]} columns of {name}")
            by_columns[id(parameter)] = Shard(parameter.dim() - 1)
    for part in (*_layers(module), module):
        fully_shard(
            part, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda parameter: by_columns.get(id(parameter))
        )


def _layers(module: Any) -> list[Any]:
    """The decoder layers: the longest list of modules."""
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def _fill(module: Any, stored: _Stored, fused: Mapping[str, RowBlock], device: torch.device) -> None:
    """Give each parameter its part. FSDP takes replaced parameters over before the first forward pass."""
    places: dict[int, list[tuple[Any, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    for name, parameter in list(module.named_parameters()):
        part = local_part(parameter)
        if name in stored:
            rows = stored.rows(name, tuple(parameter.shape), part[0])
        else:
            rows = torch.empty([one.stop - one.start for one in part], dtype=parameter.dtype)
            for held, block in fused.items():
                if block.parameter == name:
                    block.view(rows).copy_(stored.columns(held, block.shape, part[-1]))
        local = DTensor.from_local(
            # Rows of a file are a map of it.
            rows.to(device, parameter.dtype, copy=True),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        made = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
        # A tied parameter has several places.
        for part, attribute in places[id(parameter)]:
            part._parameters[attribute] = made


class _Stored:
    """Rows of the folder's tensors, read without the others."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._paths = {t.name: file.path for file in checkpoint.files for t, _ in file.header.tensors}
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def whole(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._file(name).get_tensor(name)
        return found

    def rows(self, name: str, shape: tuple[int, ...], part: slice) -> torch.Tensor:
        """Raises LocalError for a tensor of another shape."""
        # A rank beyond the last row has none.
        first = min(part.start, shape[0])
        rows: torch.Tensor = self._slice(name, shape)[first : first + part.stop - part.start]
        return rows

    def columns(self, name: str, shape: tuple[int, ...], part: slice) -> torch.Tensor:
        """Of the last dimension. Raises LocalError for a tensor of another shape."""
        columns: torch.Tensor = self._slice(name, shape)[(*[slice(None)] * (len(shape) - 1), part)]
        return columns

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        found = self._file(name).get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise LocalError(f"{self._folder}: {name} has shape {found.get_shape()}, and its model {list(shape)}")
        return found

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        path = self._paths[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
        return self._open[path]
