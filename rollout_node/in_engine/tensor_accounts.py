"""Where each of a run's tensors is in an engine.

Guarantee: a tensor is *covered* (its values, or its twin's, reach a parameter), *skipped* by a rule of this module, or
*unknown*. With an unknown tensor, an engine may compute something different from a fresh engine on the version's
folder. vLLM, for example, unties an output head if the folder's differs from the embedding.

*Twins* are tensors that share one parameter. The engine holds the values of one of them, so they must be equal in every
version. This module only sees names and numbers, and does no I/O.
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
    """The greater of two ranks' accounts is the engine's."""

    UNKNOWN = 0
    SKIPPED = 1
    COVERED = 2


_COMPUTED = re.compile(
    r"(^|\.)(rotary(_pos)?_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(masked_)?bias|position_ids)$"
)
"""Buffers that engines compute from the configuration."""
_CACHE_SCALE = re.compile(r"\.(k|v|q|kv|prob)_scale$")
"""Scales of a quantised cache, which an engine with a different cache does not read."""
_DRAFT = re.compile(r"(^|\.)mtp(_\w+)?\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Layers after the model's own are draft layers too. Draft models keep their weights."""
_PART = re.compile(r"(?:^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.")
"""Parts for images and sound, which a text-only engine does not build."""


def skipped(name: str, parts: Collection[str], layers: int | None) -> bool:
    """Whether a tensor that the engine does not read has no effect on its answers. ``parts``: components of the
    engine's parameter names; ``layers``: number of the model's own layers.
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
    """Return tensor number → number of its twin. ``shared``: for each parameter shared by several layers, its names in
    the engine, and the tensors known to fill it. ``free``: tensors that fill no parameter.
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
    """Whether the names match at their ends: engines add an outer name to a model's names, or drop the outermost."""
    return f".{name}".endswith(f".{alias}") or f".{alias}".endswith(f".{name}")


def pack(accounts: Iterable[Account]) -> bytes:
    """Pack a rank's accounts, in layout order, for its report."""
    return zlib.compress(bytes(accounts))


def together(packed: Iterable[bytes], count: int) -> list[Account]:
    """Combine the ranks' accounts into the engine's. Raises RemoteError if they are not for ``count`` tensors."""
    rows = [zlib.decompressobj().decompress(row, count + 1) for row in packed]
    if any(len(row) != count or max(row, default=0) > Account.COVERED for row in rows):
        raise RemoteError(f"a rank does not account for the run's {count} tensors; restart the engine")
    return [Account(max(column)) for column in zip(*rows, strict=True)]
