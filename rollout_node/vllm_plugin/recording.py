"""Learns where a model's weight loader puts each checkpoint tensor, without moving a byte.

Promise: the model is handed tensors that have shapes but no data, and every write is recorded instead of done, so
recording leaves the weights as they are. Only plain copies of views of the tensor, in its own dtype, into storage that
the model owns count as mapped; anything else (casts, arithmetic, values read, temporaries) makes the tensor *reload*:
it goes through the model's own loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from p2pcast.codec.layout import Layout
from rollout_node.vllm_plugin.mapping import Block, Mapping, NotABoxError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "U64": torch.uint64,
    "I64": torch.int64,
}
_WORDS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class _TransformsError(Exception):
    """The loader does more than copy."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of the model, seen as one row of integer words. ``name``: a parameter that lies in it."""

    name: str
    words: torch.Tensor

    @property
    def key(self) -> tuple[str, int]:
        return str(self.words.device), self.words.data_ptr()


class Storages:
    """The storages that a model's parameters and buffers occupy, numbered as they are first written to."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._owned: dict[tuple[str, int], str] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.device.type != "meta":
                self._owned.setdefault(_key(tensor), name)
        self.table: list[Storage] = []
        self.fills: list[tuple[torch.Tensor, Any]] = []
        """Parts that the loader sets to a constant (padding of a vocabulary), with the constant."""
        self._numbers: dict[tuple[tuple[str, int], int], int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Number of the storage under ``tensor``, in words of its width. Raises _TransformsError if it's not the model's."""
        key, width = _key(tensor), tensor.element_size()
        if key not in self._owned:
            raise _TransformsError("it writes to a temporary tensor")
        found = self._numbers.get((key, width))
        if found is None:
            storage = tensor.untyped_storage()
            row = torch.empty(0, dtype=_WORDS[width], device=tensor.device)
            row.set_(storage, 0, (storage.nbytes() // width,), (1,))
            found = self._numbers[key, width] = len(self.table)
            self.table.append(Storage(self._owned[key], row))
        return found

    def gone(self, model: torch.nn.Module) -> list[str]:
        """Names of parameters that no longer lie where they did: somebody rebound their data."""
        live = {_key(t) for t in [*model.parameters(), *model.buffers()] if t.device.type != "meta"}
        return [s.name for s in self.table if s.key not in live]


def _key(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class _StayHere(TorchFunctionMode):  # type: ignore[misc]
    """Loaders may move a tensor to their device first; one without data can't be moved, and needn't be."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cpu, torch.Tensor.cuda) and args[0].is_meta:
            return args[0]
        if func is torch.Tensor.to and args[0].is_meta:
            kwargs.pop("device", None)
            other = kwargs.pop("other", None)
            rest = [a.dtype if isinstance(a, torch.Tensor) else a for a in [*args[1:], *([] if other is None else [other])]]
            rest = [a for a in rest if not isinstance(a, torch.device | str | int) or isinstance(a, bool)]
            if rest or kwargs:
                return func(args[0], *rest, **kwargs)
            return args[0]
        return func(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Turns copies out of ``source`` into blocks and refuses every other write."""

    def __init__(self, source: torch.Tensor, storages: Storages) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.fills: list[tuple[torch.Tensor, Any]] = []
        self.touched: set[int] = set()
        self._source, self._storages = source, storages
        self._root = source.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func in (aten.fill_.Scalar, aten.zero_.default):
            self._storages.number(args[0])
            self.fills.append((args[0], args[1] if len(args) > 1 else 0))
            return args[0]
        if func in (aten.clone.default, aten._to_copy.default) and self._is_source(args[0]):
            if kwargs.get("dtype") not in (None, args[0].dtype):
                raise _TransformsError(f"it casts {args[0].dtype} to {kwargs['dtype']}")
            return args[0].detach()  # a move or a copy of the whole: still the same elements
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            raise _TransformsError(f"it writes with {func.name()}")
        return func(*args, **kwargs)

    def _is_source(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.untyped_storage()._cdata == self._root

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        number = self._storages.number(to)
        self.touched.add(number)
        if not self._is_source(source):
            raise _TransformsError("it computes what it copies")
        if to.dtype != source.dtype:
            raise _TransformsError(f"it casts {source.dtype} to {to.dtype}")
        if to.shape != source.shape:
            raise _TransformsError("it broadcasts")
        if to.numel():
            at = (source.storage_offset(), source.shape, source.stride(), number, to.storage_offset(), to.stride())
            self.blocks.append(Block.of(*at))

    def check_fills(self) -> None:
        """Raise _TransformsError if a constant lands among what is copied: the order of writes would matter."""
        for view, _ in self.fills:
            if view.numel():
                number, low = self._storages.number(view), view.storage_offset()
                high = low + 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
                for b in self.blocks:
                    end = b.at + 1 + sum((n - 1) * s for n, s in zip(b.shape, b.to_stride, strict=True))
                    if b.storage == number and low < end and b.at < high:
                        raise _TransformsError("it fills a part of what it copies")


def record(model: torch.nn.Module, layout: Layout) -> tuple[Mapping, Storages, list[str]]:
    """The mapping of a loaded model, the storages that it speaks of, and the parameters that no tensor reaches.

    ``model.load_weights`` is called once a tensor.
    """
    storages = Storages(model)
    blocks: dict[int, tuple[Block, ...]] = {}
    reload: dict[int, str] = {}
    touched: set[int] = set()
    for number, tensor in enumerate(layout.tensors):
        dtype = TORCH_DTYPES.get(tensor.dtype)
        if dtype is None or tensor.words != tensor.elements:
            reload[number] = f"its dtype {tensor.dtype} has no words of its own"
            continue
        source = torch.empty(tensor.shape, dtype=dtype, device="meta")
        recorder = _Recorder(source, storages)
        try:
            with torch.inference_mode(), _StayHere(), recorder:
                model.load_weights([(tensor.name, source)])
            recorder.check_fills()
        except NotABoxError as error:
            reload[number] = str(error)
        except Exception as error:  # noqa: BLE001 - a loader may raise anything when it meets a tensor without data
            reload[number] = f"{type(error).__name__}: {error}"[:300]
        else:
            storages.fills += recorder.fills
            if recorder.blocks:
                blocks[number] = tuple(sorted(recorder.blocks, key=lambda b: b.start))
        touched |= recorder.touched
    reached = {storages.table[n].key for n in touched}
    unreached = [] if reload else [n for n, p in model.named_parameters() if p.numel() > 1 and _key(p) not in reached]
    return Mapping(blocks, reload), storages, unreached
