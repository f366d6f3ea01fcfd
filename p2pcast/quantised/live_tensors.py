"""Quantises the tensors of a training process before it publishes them.

    publisher.publish(step, quantised(model.named_parameters(), "fp8-channel"))

Guarantee: the tensors are, bit for bit, those of a quantised folder of the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import torch
from torch.distributed.tensor import DTensor

from p2pcast.checkpoint.wrapped_names import without_adapter_layers, without_wrappers
from p2pcast.codec.layout import Tensor
from p2pcast.ground.errors import UsageError
from p2pcast.quantised.quantisation_kinds import Role, is_quantised, kind_named
from p2pcast.quantised.quantisers import quantise

_NAMES: Final = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_CODES: Final = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32}


def quantised(
    named_tensors: Iterable[tuple[str, torch.Tensor]], kind: str, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that replace ``named_tensors``, which must be whole tensors on this rank. Names may contain the
    parts added by wrappers and PEFT, and keep them. ``dtype``: dtype of the weights as trained, to which floating
    tensors are cast first, because scales depend on it.

    Raises UsageError (unknown kind or dtype, a sharded tensor) and IntegrityError (NaN or infinity).
    """
    chosen = kind_named(kind)
    if dtype not in _NAMES:
        raise UsageError(f"dtype={dtype}: weights as trained are torch.bfloat16, torch.float16 or torch.float32")
    for name, tensor in named_tensors:
        if isinstance(tensor, DTensor):
            raise UsageError(f"{name}: a tensor in shards; gather it first, for example with full_tensor()")
        live = tensor.detach()
        cast = live.to(dtype) if live.is_floating_point() else live
        form = Tensor(name, _NAMES.get(cast.dtype, "I64"), tuple(cast.shape))
        # A wrapper right around a linear stands between the names by which its weight is known.
        if not is_quantised(replace(form, name=without_adapter_layers(without_wrappers(name)))):
            yield name, cast
            continue
        codes, scales = (torch.from_numpy(found) for found in quantise(chosen, cast.cpu(), name))
        for part, role in chosen.parts(form):
            if role is Role.SHAPE:
                yield part.name, torch.tensor(form.shape, dtype=torch.int64)
                continue
            width = _CODES[part.dtype] if role is Role.CODES else (dtype if chosen.packed else torch.float32)
            yield part.name, (codes if role is Role.CODES else scales).view(width).view(part.shape)
