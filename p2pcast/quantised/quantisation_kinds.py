"""The kinds of quantised state, and how each is stored in a checkpoint.

Guarantee: a kind fixes the names, dtypes and shapes of the quantised tensors, and the ``quantization_config`` that an
engine needs to load them. Which tensors are quantised depends only on the layout. It does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from p2pcast.codec.layout import Tensor
from p2pcast.ground.errors import IntegrityError, UsageError

BLOCK: Final = 128
"""Number of rows, and of columns, in a block with one scale (fp8-block)."""
FLOATS: Final = frozenset({"BF16", "F16", "F32"})
"""Dtypes of weights that can be quantised."""
_LINEAR: Final = re.compile(r"(?:\A|\.)\w*proj\w*\.weight\Z")
"""Weights of linear layers inside a model. Embeddings, heads, routers and norms are named differently."""
_TOWERS: Final = frozenset({"visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"})
"""Modules next to the language model, whose weights are not quantised."""


class Role(Enum):
    """The part of a quantised weight that a tensor contains. COPY: a tensor that is not quantised."""

    COPY = "copy"
    CODES = "codes"
    SCALES = "scales"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class QuantisationKind:
    """``codes``: dtype of the code tensor. ``scales``: last part of the scale tensor's name. ``rows``, ``columns``:
    size of the block of weights that shares a scale; 0 means all columns. ``packed``: four codes per word.
    """

    name: str
    codes: str
    scales: str
    rows: int
    columns: int
    packed: bool = False

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.columns) if self.columns else 1

    def parts(self, weight: Tensor) -> list[tuple[Tensor, Role]]:
        """Return the tensors that replace ``weight``. Raises IntegrityError for a shape that this kind cannot store."""
        rows, columns = weight.shape
        stem = weight.name.removesuffix("weight")
        scales = (Tensor(stem + self.scales, self._scale_dtype(weight), self.scale_shape(rows, columns)), Role.SCALES)
        if not self.packed:
            return [(Tensor(stem + "weight", self.codes, (rows, columns)), Role.CODES), scales]
        if columns % 4:
            raise IntegrityError(
                f"tensor {weight.name!r}: {columns} columns; {self.name} packs four weights of a row into a word"
            )
        return [
            (Tensor(stem + "weight_packed", self.codes, (rows, columns // 4)), Role.CODES),
            scales,
            (Tensor(stem + "weight_shape", "I64", (2,)), Role.SHAPE),
        ]

    def _scale_dtype(self, weight: Tensor) -> str:
        return weight.dtype if self.packed else "F32"

    def engine_config(self, ignored: Iterable[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` for config.json. ``ignored``: modules that are not quantised."""
        left = sorted({*ignored, "lm_head"})
        if self.name == "fp8-block":
            return {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [self.rows, self.columns],
                "modules_to_not_convert": left,
            }
        of = "float" if self.codes == "F8_E4M3" else "int"
        group: dict[str, Any] = {"targets": ["Linear"], "weights": _numbers(of, "channel", dynamic=False)}
        if not self.packed:
            group["input_activations"] = _numbers(of, "token", dynamic=True)
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.packed else f"{of}-quantized",
            "ignore": left,
            "config_groups": {"group_0": group},
        }


def _numbers(of: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": of, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


KINDS: Final = {
    kind.name: kind
    for kind in (
        QuantisationKind("fp8-channel", "F8_E4M3", "weight_scale", 1, 0),
        QuantisationKind("fp8-block", "F8_E4M3", "weight_scale_inv", BLOCK, BLOCK),
        QuantisationKind("int8-channel", "I8", "weight_scale", 1, 0),
        QuantisationKind("int8-weight-only", "I32", "weight_scale", 1, 0, packed=True),
    )
}
"""``int8-weight-only``: codes and scales of int8-channel, packed for engines that do not quantise activations."""


def kind_named(name: str) -> QuantisationKind:
    """Return the kind of that name. Raises UsageError."""
    if name not in KINDS:
        raise UsageError(f"{name[:40]!r} is no kind of quantisation: choose one of {', '.join(KINDS)}")
    return KINDS[name]


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor is quantised. Raises IntegrityError for experts in one tensor, which no kind supports."""
    names = tensor.name.split(".")
    if not _TOWERS.isdisjoint(names) or tensor.dtype not in FLOATS:
        return False
    if len(tensor.shape) == 3 and "experts" in names and "bias" not in names[-1]:
        raise IntegrityError(
            f"tensor {tensor.name!r}: experts in one tensor of 3 dimensions cannot be quantised; "
            "save a tensor for each expert, or leave this run unquantised"
        )
    return len(tensor.shape) == 2 and min(tensor.shape) > 0 and _LINEAR.search(tensor.name) is not None
