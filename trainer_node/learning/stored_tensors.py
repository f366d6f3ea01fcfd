"""Where the tensors of a Hugging Face folder lie in the parameters of its model.

transformers computes some models in another form than their folders have. The matrices of experts, for instance, are
tensors of their own in the folder, and rows of one parameter in the model.

Guarantee: a tensor is found as a block of rows of one parameter, by transformers' own way of saving models, or the
model is refused. The words themselves are compared with the folder's by ``check``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.ground.errors import UsageError


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows [``first``, ``first + count``) of a parameter whose leading dimensions are flattened. ``shape``: of the
    stored tensor.
    """

    parameter: str
    first: int
    count: int
    shape: tuple[int, ...]

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """A view of the block. A parameter on several ranks is sharded by its last dimension, and so is the block."""
        if not isinstance(parameter, DTensor):
            return self.view(parameter.detach())
        return DTensor.from_local(
            self.view(parameter.detach().to_local()),
            parameter.device_mesh,
            [Shard(len(self.shape) - 1)],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=torch.empty(self.shape, device="meta").stride(),
        )

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Of a whole parameter, or of some columns of it."""
        rows = parameter if parameter.dim() < 2 else parameter.flatten(0, -2)
        last = () if parameter.dim() < 2 else parameter.shape[-1:]
        return rows[self.first : self.first + self.count].view(*self.shape[: len(self.shape) - len(last)], *last)


def blocks(module: Any, names: Collection[str]) -> dict[str, RowBlock]:
    """The stored tensors, by name, of those parameters of ``module`` that the folder does not hold by their own names.
    ``names``: of the folder's tensors. Raises UsageError for a parameter of which the folder holds no tensors.
    """
    fused = {name: p for name, p in module.named_parameters() if name not in names}
    if not fused:
        return {}
    counts = {name: _rows(parameter) for name, parameter in fused.items()}
    firsts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    found: dict[str, RowBlock] = {}
    for name, saved in _saved(module, {name: _numbered(p, firsts[name]) for name, p in fused.items()}).items():
        owner = next(one for one in reversed(firsts) if firsts[one] <= int(saved.flatten()[0]))
        parameter = fused[owner]
        numbers = saved if parameter.dim() < 2 else saved[..., 0]
        first, count = int(numbers.flatten()[0]), numbers.numel()
        if name not in names or not torch.equal(numbers.flatten(), torch.arange(first, first + count)):
            raise UsageError(
                f"the model trains {owner!r}, which its folder holds in no tensor or in another order of rows: such a"
                " model cannot be published. If its head is missing, save the model with its head"
            )
        last = () if parameter.dim() < 2 else parameter.shape[-1:]
        found[name] = RowBlock(owner, first - firsts[owner], count, (*numbers.shape, *last))
    for owner, count in counts.items():
        _require_cover(owner, count, [block for block in found.values() if block.parameter == owner])
    return found


def _require_cover(owner: str, count: int, parts: Sequence[RowBlock]) -> None:
    """Raises UsageError unless each row of the parameter is in one block: all that is trained has to be published."""
    end = 0
    for part in sorted(parts, key=lambda block: block.first):
        if part.first != end:
            break
        end += part.count
    else:
        if end == count:
            return
    raise UsageError(
        f"the model trains {owner!r}, and its folder holds {end} of its {count} rows once: such a model cannot be"
        " published"
    )


def dtypes(fused: Mapping[str, RowBlock], stored: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """The dtype in which each fused parameter is published. ``stored``: of the folder's tensors. Raises UsageError for
    a parameter whose tensors have several.
    """
    found: dict[str, torch.dtype] = {}
    for name, block in fused.items():
        if found.setdefault(block.parameter, stored[name]) != stored[name]:
            raise UsageError(
                f"{name} is {stored[name]}, and other parts of {block.parameter!r} are {found[block.parameter]}: such a"
                " model cannot be published"
            )
    return found


def check(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError unless the tensors have the folder's words."""
    from safetensors import safe_open

    for file in checkpoint.files:
        with safe_open(str(file.path), framework="pt") as stored:
            for known, _ in file.header.tensors:
                if known.name not in tensors:
                    continue
                tensor, words = tensors[known.name], stored.get_tensor(known.name)
                if isinstance(tensor, DTensor):
                    tensor, words = tensor.to_local(), words[local_part(tensor)]
                mine, words = tensor.to("cpu", words.dtype).contiguous(), words.contiguous()
                if mine.shape != words.shape or not torch.equal(mine.view(torch.uint8), words.view(torch.uint8)):
                    raise UsageError(
                        f"{checkpoint.folder}: {known.name} has other words in the model that transformers has loaded:"
                        " such a model cannot be published"
                    )


def local_part(tensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))


def _rows(parameter: torch.Tensor) -> int:
    return parameter.numel() if parameter.dim() < 2 else math.prod(parameter.shape[:-1])


def _numbered(parameter: torch.Tensor, first: int) -> torch.Tensor:
    """The numbers of the parameter's rows, in its form. Each row has its number twice: transformers squeezes dimensions
    of 1.
    """
    numbers = torch.arange(first, first + _rows(parameter))
    return numbers if parameter.dim() < 2 else numbers.view(*parameter.shape[:-1], 1).repeat_interleave(2, -1)


def _saved(module: Any, numbers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The numbers as transformers would save them, under the names of the folder."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, torch.Tensor] = revert_weight_conversion(module, dict(numbers))
    return found
