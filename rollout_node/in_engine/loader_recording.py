"""Records where a model's weight loader puts each checkpoint tensor, without moving a byte.

Guarantee: the model's loader receives tensors with shapes but no data, and every write is recorded instead of executed,
so recording leaves the weights unchanged. A tensor counts as mapped only if views of it, in its own dtype, are copied
into storage that the model owns. Any other operation (casts, arithmetic, reading values, temporaries) marks the tensor
*reload*: only the model's own loader can install it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from p2pcast.codec.layout import Layout, Tensor
from rollout_node.in_engine.loader_rehearsal import WORDS, StorageSpan, rehearse, written_tensors
from rollout_node.in_engine.tensor_accounts import twins
from rollout_node.in_engine.weight_mapping import Mapping, NotABoxError, StridedBlock

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


@dataclass(frozen=True, slots=True)
class Storage:
    """One of the model's storages, as a row of integer words. ``name``: a parameter in it."""

    name: str
    words: torch.Tensor

    @property
    def key(self) -> tuple[str, int]:
        return str(self.words.device), self.words.data_ptr()


class Storages:
    """The storages of a model's parameters and buffers, numbered in order of first write."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._owned: dict[tuple[str, int], str] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.device.type != "meta":
                self._owned.setdefault(_key(tensor), name)
        self.table: list[Storage] = []
        self.fills: list[tuple[torch.Tensor, Any]] = []
        """Parts that the loader sets to a constant (such as vocabulary padding), with the constant."""
        self._numbers: dict[tuple[tuple[str, int], int], int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Number of the storage of ``tensor``, which the model must own, in words of the tensor's width."""
        key, width = _key(tensor), tensor.element_size()
        found = self._numbers.get((key, width))
        if found is None:
            storage = tensor.untyped_storage()
            row = torch.empty(0, dtype=WORDS[width], device=tensor.device)
            row.set_(storage, 0, (storage.nbytes() // width,), (1,))
            found = self._numbers[key, width] = len(self.table)
            self.table.append(Storage(self._owned[key], row))
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in one of the model's storages."""
        return not tensor.is_meta and _key(tensor) in self._owned

    def rebound(self, model: torch.nn.Module) -> list[str]:
        """Names of parameters whose data was rebound to a different storage."""
        live = {_key(t) for t in [*model.parameters(), *model.buffers()] if t.device.type != "meta"}
        return [s.name for s in self.table if s.key not in live]


def _key(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


class _KeepOnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Ignores moves of tensors without data to a different device. Loaders request them, but they are impossible and
    unnecessary.
    """

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cpu, torch.Tensor.cuda) and args[0].is_meta:
            return args[0]
        if func is torch.Tensor.to and args[0].is_meta:
            kwargs.pop("device", None)
            other = kwargs.pop("other", None)
            rest = [
                a.dtype if isinstance(a, torch.Tensor) else a for a in [*args[1:], *([] if other is None else [other])]
            ]
            rest = [a for a in rest if not isinstance(a, torch.device | str | int) or isinstance(a, bool)]
            if rest or kwargs:
                return func(args[0], *rest, **kwargs)
            return args[0]
        return func(*args, **kwargs)


class _Source(NamedTuple):
    """Tensor ``number`` of the layout, or a tensor computed from it if ``exact`` is False."""

    number: int
    tensor: torch.Tensor
    exact: bool


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Turns copies from its sources into blocks, skips all writes to the model, and notes other operations."""

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self.blocks: dict[int, list[StridedBlock]] = {}
        self.fills: list[tuple[torch.Tensor, Any]] = []
        self.touched: set[int] = set()
        self.seen: set[int] = set()
        """Sources used in any operation other than taking a view."""
        self.reasons: dict[int, str] = {}
        """Source that is not merely copied → the reason."""
        self.unattributed: str | None = None
        """Such a reason whose source is unknown."""
        self._storages = storages
        self._sources: dict[int, _Source] = {}

    def source(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without data whose views are recognised."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._sources[tensor.untyped_storage()._cdata] = _Source(number, tensor, exact=True)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        numbers = {known.number for value in tree_leaves([args, kwargs]) if (known := self._source_of(value))}
        targets = written_tensors(func, args, kwargs)
        if any(map(self._storages.owns, targets)):
            self.seen |= numbers
            return self._write(func, targets, args)
        if func in (aten.clone.default, aten.contiguous.default, aten._to_copy.default) and numbers:
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0].detach()  # a move or a whole copy keeps the elements
            self._note_transform(f"it casts {args[0].dtype} to {kwargs['dtype']}", *numbers)
        if targets and numbers:  # the loader's own buffer, or the source itself
            self.seen |= numbers
            self._note_transform(f"it writes with {func.name()}", *numbers)
            if any(value.is_meta for value in args if isinstance(value, torch.Tensor)) and not targets[0].is_meta:
                return targets[0]  # there is no data to write
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves([result, targets]) if isinstance(t, torch.Tensor)]
        if not all(map(self._source_of, tensors)):  # not only a view
            self.seen |= numbers
        if len(numbers) == 1:  # values computed from one source belong to that source
            (number,) = numbers
            for tensor in tensors:
                if tensor.is_meta and not self._source_of(tensor):
                    self._sources[tensor.untyped_storage()._cdata] = _Source(number, tensor, exact=False)
        return result

    def _write(self, func: Any, targets: list[torch.Tensor], args: Sequence[Any]) -> Any:
        """Record a write to the model without executing it."""
        aten = torch.ops.aten
        self.touched |= {self._storages.number(t) for t in targets if self._storages.owns(t)}
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self.fills.append((args[0], args[1] if len(args) > 1 else 0))
        else:
            self._note_transform(f"it writes with {func.name()}")
        return targets[0]

    def _note_transform(self, reasons: str, *numbers: int) -> None:
        """Note the reason and continue, to find further writes. ``numbers``: the sources concerned, if known."""
        if len(numbers) == 1:
            self.reasons.setdefault(numbers[0], reasons)
        else:
            self.unattributed = self.unattributed or reasons

    def _source_of(self, tensor: Any) -> _Source | None:
        """The source of which this is a view, if any."""
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return None
        return self._sources.get(tensor.untyped_storage()._cdata)

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        known = self._source_of(source)
        if known is None or not known.exact:
            self._note_transform("it computes the values that it copies", *([known.number] if known else []))
        elif to.dtype != source.dtype:
            self._note_transform(f"it casts {source.dtype} to {to.dtype}", known.number)
        elif to.shape != source.shape:
            self._note_transform("it broadcasts", known.number)
        elif to.numel():
            storage = self._storages.number(to)
            at = (source.storage_offset(), source.shape, source.stride(), storage, to.storage_offset(), to.stride())
            try:
                self.blocks.setdefault(known.number, []).append(StridedBlock.of(*at))
            except NotABoxError as error:
                self._note_transform(str(error), known.number)

    def check_fills(self) -> None:
        """Note fills that overlap copies, because the result depends on the unknown order of the writes."""
        copied: dict[tuple[str, int], list[StorageSpan]] = {}
        for block in (block for blocks in self.blocks.values() for block in blocks):
            span = StorageSpan.of(
                self._storages.table[block.storage].words.as_strided(block.shape, block.to_stride, block.at)
            )
            copied.setdefault(span[:2], []).append(span)
        for filled in (StorageSpan.of(view) for view, _ in self.fills):
            if any(filled.meets(span) for span in copied.get(filled[:2], ())):
                self._note_transform("a fill overlaps its copies")


class _Record:
    """The results of ``record``. ``reached``: storages to which a tensor is written; ``seen``: used tensors."""

    def __init__(self, model: torch.nn.Module, layout: Layout) -> None:
        self.storages = Storages(model)
        self.blocks: dict[int, tuple[StridedBlock, ...]] = {}
        self.reload: dict[int, str] = {}
        self.reached: set[tuple[str, int]] = set()
        self.seen: set[int] = set()
        self._model: Any = model
        self._layout = layout

    def run(self, numbers: Sequence[int]) -> str | None:
        """Load these tensors, which have a dtype, in one call. Returns None, or a reason whose source is unknown.

        The results are kept only if None is returned.
        """
        recorder = _Recorder(self.storages)
        tensors = [self._layout.tensors[number] for number in numbers]
        sources = (
            (t.name, recorder.source(n, t.shape, TORCH_DTYPES[t.dtype])) for n, t in zip(numbers, tensors, strict=True)
        )
        try:
            with torch.inference_mode(), _KeepOnMeta(), recorder:
                self._model.load_weights(sources)
            recorder.check_fills()
        except Exception as error:  # noqa: BLE001 - loaders raise arbitrary errors for tensors without data
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            self.seen |= recorder.seen
        self.reached |= {self.storages.table[n].key for n in recorder.touched}
        lost = recorder.seen - recorder.reasons.keys() - recorder.blocks.keys()  # used, but no write was recorded
        if recorder.unattributed or (lost and len(numbers) > 1):
            return recorder.unattributed or "it joins tensors"
        self.reload |= recorder.reasons
        self.storages.fills += recorder.fills
        for number, blocks in recorder.blocks.items():
            if number not in recorder.reasons:
                self.blocks[number] = tuple(sorted(blocks, key=lambda b: b.start))
        return None

    def rehearse(self, number: int) -> None:
        """Load a tensor with values, to find the storages to which it is written."""
        tensor = self._layout.tensors[number]
        values = torch.zeros(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        _, spans = rehearse(self._model, self.storages.owns, tensor.name, values)
        self.reached |= {(span.device, span.storage) for span in spans}


def _has_words(tensor: Tensor) -> bool:
    return tensor.dtype in TORCH_DTYPES and tensor.words == tensor.elements


def record(model: torch.nn.Module, layout: Layout) -> tuple[Mapping, Storages, list[str]]:
    """Return the mapping of a loaded model, its storages, and the parameters that no tensor reaches on its own.

    These include parameters of tensors that the loader uses but cannot install one by one. ``model.load_weights`` is
    called once, and again for each tensor if the first call cannot attribute an operation to one tensor.
    """
    found = _Record(model, layout)
    numbered = list(enumerate(layout.tensors))
    numbers = [n for n, t in numbered if _has_words(t)]
    packed = {n: f"its dtype {t.dtype} has no words of its own" for n, t in numbered if not _has_words(t)}
    seen: set[int] = set()
    if found.run(numbers):
        seen = found.seen
        found = _Record(model, layout)
        for number in numbers:
            if reasons := found.run([number]):
                found.reload[number] = reasons
                found.rehearse(number)
    found.reload |= packed
    unreached = [
        n for n, p in model.named_parameters() if p.numel() > 1 and _key(p) not in found.reached and not packed
    ]
    joined = sorted(seen - found.blocks.keys() - found.reload.keys())
    unreached += [
        f"the parameters that tensor {layout.tensors[n].name} fills together with other tensors" for n in joined
    ]
    unreached += filled_twice(found.blocks, found.storages)
    found_twins = twins_of(model, layout, found.blocks, found.reload, found.storages)
    return Mapping(found.blocks, found.reload, found_twins), found.storages, unreached


def twins_of(
    model: torch.nn.Module,
    layout: Layout,
    blocks: dict[int, tuple[StridedBlock, ...]],
    reload: Collection[int],
    storages: Storages | None = None,
) -> dict[int, int]:
    """Return the tensors that share one parameter (``tensor_accounts.twins``), because the engine shares it between
    layers or the loader writes several tensors to it. Without ``storages``, tensors are recognised only by name.
    """
    names: dict[tuple[Any, ...], set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if not p.is_meta and p.numel() > 1:
            names.setdefault((_key(p), p.storage_offset()), set()).add(name)
    holders: dict[tuple[str, int], set[int]] = {}
    first: dict[tuple[StridedBlock, ...], int] = {}
    for number, found in blocks.items():
        first.setdefault(found, number)
        for block in found:
            assert storages is not None, "blocks are of storages"
            holders.setdefault(storages.table[block.storage].key, set()).add(number)
    shared = [(aliases, holders.get(key, set())) for (key, _), aliases in names.items() if len(aliases) > 1]
    free = set(range(len(layout.tensors))) - ({*blocks, *reload} if storages is not None else set())
    written = {number: first[found] for number, found in blocks.items() if first[found] != number}
    return written | twins(layout.tensors, free, shared)


def filled_twice(blocks: dict[int, tuple[StridedBlock, ...]], storages: Storages) -> list[str]:
    """Parameters to which partly overlapping tensors are written, so that the result depends on the order."""
    elements: dict[int, int] = {}
    for block in (block for found in {*blocks.values()} for block in found):
        elements[block.storage] = elements.get(block.storage, 0) + block.elements
    full = ((storages.table[number], n) for number, n in elements.items())
    return [f"{s.name}, of which several tensors fill the same elements" for s, n in full if n > s.words.numel()]
