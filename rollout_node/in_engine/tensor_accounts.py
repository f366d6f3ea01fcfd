"""Where each tensor of a run is in an engine.

Promise: a tensor is *covered* (its values reach a parameter, or its twin's do), *skipped* by a rule of this module, or
*unknown*. With an unknown tensor, an engine may compute something else than a fresh engine on the version's folder.
vLLM, for example, unties an output head where the folder holds another one than the embedding.

*Twins* are tensors that one parameter serves. The engine holds the values of one of them, so a version must have equal
values for all. Pure: names and numbers alone.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum

from p2pcast.codec.layout import Tensor
from p2pcast.ground.errors import RemoteError


class Account(IntEnum):
    """The greater one of two ranks' accounts is the engine's."""

    UNKNOWN = 0
    SKIPPED = 1
    COVERED = 2


_COMPUTED = re.compile(
    r"(^|\.)(rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|position_ids)$"
)
"""Buffers that engines compute from the configuration."""
_CACHE_SCALE = re.compile(r"\.(k|v|q|kv|prob)_scale$")
"""Scales of a quantised cache, which an engine with another cache does not read."""
_DRAFT = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Layers after the model's own are draft layers, too. Draft models keep their weights."""
_PART = re.compile(r"(?:^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.")
"""Parts for images and sound, which an engine for text alone does not build."""


def skipped(name: str, parts: Collection[str], layers: int | None) -> bool:
    """Whether a tensor that the engine does not read changes no answer. ``parts``: components of the names of the
    engine's parameters; ``layers``: number of the model's own layers.
    """
    if _COMPUTED.search(name) or _CACHE_SCALE.search(name) or _DRAFT.search(name):
        return True
    if (layer := _LAYER.search(name)) and layers is not None and int(layer[1]) >= layers:
        return True
    part = _PART.search(name)
    return part is not None and part[1] not in parts


def twins(
    tensors: Sequence[Tensor], free: AbstractSet[int], shared: Iterable[tuple[Collection[str], Collection[int]]]
) -> dict[int, int]:
    """Number of a tensor → the tensor whose twin it is. ``shared``: for each parameter that serves several layers, its
    names in the engine, and the tensors that fill it as far as is known. ``free``: tensors that fill no parameter.
    """
    found: dict[int, int] = {}
    for aliases, holders in shared:
        named = [n for n, tensor in enumerate(tensors) if any(_same_end(tensor.name, alias) for alias in aliases)]
        for n in free & {*named}:
            form = tensors[n].dtype, tensors[n].shape
            alike = (t for t in holders or named if (tensors[t].dtype, tensors[t].shape) == form)
            twin = min(alike, key=lambda t: (t in free, t), default=n)
            if twin != n:
                found[n] = twin
    return found


def _same_end(name: str, alias: str) -> bool:
    """Engines put a model's names below another one, or leave the outermost out."""
    return f".{name}".endswith(f".{alias}") or f".{alias}".endswith(f".{name}")


def pack(accounts: Iterable[Account]) -> bytes:
    """A rank's accounts, in the order of the layout, for its report."""
    return zlib.compress(bytes(accounts))


def together(packed: Iterable[bytes], count: int) -> list[Account]:
    """The engine's accounts from those of its ranks. Raises RemoteError for accounts of other than ``count``
    tensors.
    """
    rows = [zlib.decompressobj().decompress(row, count + 1) for row in packed]
    if any(len(row) != count or max(row, default=0) > Account.COVERED for row in rows):
        raise RemoteError(f"a rank does not account for the run's {count} tensors; restart the engine")
    return [Account(max(column)) for column in zip(*rows, strict=True)]
