"""Maps live tensors to a checkpoint's names: which of them make up the state, and the dtype each is published with.

Guarantee: either the tensors have exactly the base's names and shapes, or one UsageError lists every difference. The
same holds for the hub's newest version. The result depends only on names, shapes, dtypes and storages, so it is the
same on all ranks. Nothing is copied; no I/O.

Wrappers add their own parts to names (``module.``, ``_orig_mod.`` …); these are removed wherever they occur. A tensor
that is missing from the base is dropped only if it equals one of the base's (a tied ``lm_head.weight``).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from p2pcast.checkpoint.adapter_form import adapter_of
from p2pcast.checkpoint.wrapped_names import without_wrappers
from p2pcast.codec.layout import Tensor
from p2pcast.ground.errors import UsageError

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
}
"""The names that safetensors gives torch's dtypes."""
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}

Rename = Mapping[str, str] | Callable[[str], str]
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor of the trainer under its checkpoint name. ``tensor`` is detached, and may be a DTensor."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in self.tensor.shape)

    def local(self) -> torch.Tensor:
        """The part of the tensor on this rank."""
        return local_of(self.tensor)


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """A table of tensors that the live ones have to match; ``where`` names it in messages. ``besides``: adapters that
    the table does not contain, and whose matrices may come in addition.
    """

    where: str
    tensors: Mapping[str, Tensor]
    besides: frozenset[str] = frozenset()

    @classmethod
    def of(cls, where: str, tensors: Iterable[Tensor], beside: Collection[str] = ()) -> ExpectedTensors:
        """Make a table. ``beside``: the state's adapters, each of which may be missing from the table completely."""
        table = {t.name: t for t in tensors}
        return cls(where, table, frozenset(beside) - {adapter_of(name) for name in table})

    def leaves_open(self, name: str) -> bool:
        """Whether the table makes no statement about this tensor."""
        return adapter_of(name) in self.besides


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def checkpoint_name(name: str, rename: Rename | None = None) -> str:
    """Return ``name`` without wrappers' parts, renamed with a mapping (names not in it stay) or a function."""
    plain = without_wrappers(name)
    if rename is None:
        return plain
    if isinstance(rename, Mapping):
        return rename.get(plain, plain)
    return rename(plain)


def named(tensors: NamedTensors, rename: Rename | None = None) -> Iterator[LiveTensor]:
    """Yield the tensors one by one. Raises UsageError for an entry that is not a tensor."""
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"{name!r} is {type(tensor).__name__}: publish takes names and tensors, as by model.named_parameters()"
            )
        live = LiveTensor(checkpoint_name(name, rename), tensor.detach())
        del tensor
        yield live
        # The iterator may need this memory for its next tensor.
        del live


def fit(
    live: Sequence[LiveTensor], known: Sequence[ExpectedTensors], dtype: torch.dtype
) -> list[tuple[LiveTensor, Tensor]]:
    """Return the tensors that make up the state, each with its published dtype. ``known``: the tables to match; the
    first that has a tensor decides its dtype. In no table, floating tensors become ``dtype`` and others keep theirs.
    Raises UsageError with every difference.
    """
    kept, faults = _without_aliases(live, known)
    check(kept, faults, known)
    table = ChainMap(*(dict(other.tensors) for other in known))
    out: list[tuple[LiveTensor, Tensor]] = []
    for one in kept:
        as_known = table.get(one.name)
        target = dtype if one.tensor.is_floating_point() else one.tensor.dtype
        out.append((one, as_known or Tensor(one.name, DTYPES[target], one.shape)))
    return out


def check(kept: Sequence[LiveTensor], faults: Sequence[str], known: Sequence[ExpectedTensors]) -> None:
    """Raises UsageError with all ``faults``, and with every difference between ``kept`` and the tables."""
    blocks = [_block("these tensors cannot be published", faults)] if faults else []
    for other in known:
        blocks += [
            _block(f"these tensors are not those of {other.where}", lines)
            for lines in [_differences(kept, other)]
            if lines
        ]
    if blocks:
        raise UsageError("\n".join(blocks))


def fault(one: LiveTensor) -> str | None:
    """Return why a file cannot contain this tensor, or None."""
    if one.tensor.is_meta:
        return f"{one.name}: is on the meta device, it has no values"
    if one.tensor.dtype not in DTYPES or one.tensor.layout is not torch.strided:
        return f"{one.name}: {one.tensor.dtype}, {one.tensor.layout} cannot be in a safetensors file"
    return None


def _block(title: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"{title}:", *lines])


def _without_aliases(
    live: Sequence[LiveTensor], known: Sequence[ExpectedTensors]
) -> tuple[list[LiveTensor], list[str]]:
    """Return the tensors without duplicates, and one line for each that cannot be published."""
    kept: dict[str, LiveTensor] = {}
    faults: list[str] = []
    seen: set[Any] = set()
    expected = {name for other in known for name in other.tensors}
    extra: list[LiveTensor] = []
    for one in live:
        if (why := fault(one)) is not None:
            faults.append(why)
        elif one.name in kept:
            if not same(one.tensor, kept[one.name].tensor):
                faults.append(f"{one.name}: comes twice, with different values")
        elif known and one.name not in expected and not any(other.leaves_open(one.name) for other in known):
            extra.append(one)
        elif not known and (place := _place(one.tensor)) is not None and place in seen:
            pass  # tied to an earlier one
        else:
            seen.add(_place(one.tensor))
            kept[one.name] = one
    # A tensor in no table is dropped if it duplicates another. Otherwise it stays, and is reported as unexpected.
    for one in extra:
        if not any(_tied(one.tensor, other.tensor) for other in kept.values()):
            kept.setdefault(one.name, one)
    return list(kept.values()), faults


def _differences(kept: Sequence[LiveTensor], known: ExpectedTensors) -> list[str]:
    """Return one line for every difference between the tensors and the table."""
    mine = {one.name: one for one in kept if not known.leaves_open(one.name)}
    lines = [f"missing: {name}" for name in known.tensors if name not in mine]
    lines += [f"unexpected: {name}" for name in mine if name not in known.tensors]
    for name, one in mine.items():
        other = known.tensors.get(name)
        if other is None:
            continue
        here = DTYPES[one.tensor.dtype]
        if one.shape != other.shape:
            lines.append(f"{name}: {here}{list(one.shape)} here, {other.dtype}{list(other.shape)} there")
        elif not castable(one.tensor.dtype, other.dtype):
            lines.append(f"{name}: {here} here, which cannot become {other.dtype}")
    return lines


def castable(dtype: torch.dtype, name: str) -> bool:
    """Whether tensors of ``dtype`` may be published as the dtype of this name."""
    target = TORCH_DTYPES.get(name)
    return target is not None and _kind(target) == _kind(dtype)


def _kind(dtype: torch.dtype) -> str:
    """Values are cast only within a kind; all other dtypes must be equal."""
    return "floating" if dtype.is_floating_point else str(dtype)


def _place(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors in the same memory; None if unknown (an empty shard without storage)."""
    local = local_of(tensor)
    start = local.untyped_storage().data_ptr()
    return (start, local.storage_offset(), tuple(tensor.shape), local.stride(), local.dtype) if start else None


def _tied(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``one`` may be dropped because ``other`` stays. Equal values count only for matrices, since norms and
    biases are often all ones or zeros.
    """
    if _place(one) is not None and _place(one) == _place(other):
        return True
    mine = local_of(one).reshape(-1)
    return one.dim() >= 2 and same(one, other) and (mine.numel() == 0 or bool((mine != mine[0]).any()))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two share memory, or have the same bits on this rank."""
    if one.shape != other.shape or one.dtype != other.dtype or _placing(one) != _placing(other):
        return False
    place = _place(one)
    if place is not None and place == _place(other):
        return True
    mine, theirs = (local_of(t).reshape(-1) for t in (one, other))
    return bool(mine.device == theirs.device and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)))


def _placing(tensor: torch.Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
