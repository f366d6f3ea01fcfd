"""The experts that the layers of a mixture-of-experts model routed a trajectory's tokens to.

A token is routed when the engine computes it as input, so the last token of a trajectory has no experts.

Guarantee: equal sets of experts have equal bytes. Ids ascend within a token's layer, and a layer without experts has
only zeros. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import numpy as np

from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.rollout_fields import MAX_SPANS, Count
from p2pcast.wire.constraints import AtMost, Blob, Integer, OneOf

MAX_LAYERS, MAX_TOP_K, MAX_EXPERTS = 1024, 256, 1 << 16
MAX_ROUTED_BYTES: Final = 16 * limits.MIB
"""Most bytes of ids. 32 768 tokens of a model with 48 layers and 8 experts per token take 12 MiB."""
_DTYPES: Final = {1: "u1", 2: "<u2"}


class ExpertShape(NamedTuple):
    """The shape of a model's experts. ``experts``: their number in each layer that has experts."""

    layers: int
    top_k: int
    experts: int

    @classmethod
    def parse(cls, text: str) -> ExpertShape:
        """Parse ``LAYERS,TOP_K,EXPERTS``. Raises UsageError."""
        parts = [int(part) if part.isdecimal() and len(part) < 6 else 0 for part in text.split(",")]
        limits_of = (MAX_LAYERS, MAX_TOP_K, MAX_EXPERTS)
        if len(parts) != 3 or not all(0 < n <= most for n, most in zip(parts, limits_of, strict=True)):
            raise UsageError(f"{text!r} is no shape of experts: LAYERS,TOP_K,EXPERTS, for example 48,8,128")
        if parts[1] > parts[2]:
            raise UsageError(f"{text!r} is no shape of experts: {parts[1]} experts a token of only {parts[2]}")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.layers} layers with {self.top_k} of {self.experts} experts"


class RoutedExperts(NamedTuple):
    """``width``: bytes per id: 1 for up to 256 experts, otherwise 2. ``spans``: tokens [start, end) that have experts.
    ``ids``: the experts of these tokens in order, as tokens × layers × top_k little-endian integers.
    """

    layers: Annotated[int, Integer(1, MAX_LAYERS)]
    top_k: Annotated[int, Integer(1, MAX_TOP_K)]
    width: Annotated[int, OneOf((1, 2))]
    spans: Annotated[Sequence[tuple[Count, Count]], AtMost(MAX_SPANS)]
    ids: Annotated[bytes, Blob(MAX_ROUTED_BYTES)]

    @property
    def tokens(self) -> int:
        """Number of tokens that have experts."""
        return sum(end - start for start, end in self.spans)

    def array(self) -> np.ndarray:
        """The ids as an array of tokens × layers × top_k. Raises ValueError if ``ids`` has the wrong length."""
        return np.frombuffer(self.ids, _DTYPES[self.width]).reshape(self.tokens, self.layers, self.top_k)

    def since(self, first: int) -> RoutedExperts | None:
        """The experts of tokens from ``first`` on, or None if there are none."""
        kept = tuple((max(start, first), end) for start, end in self.spans if end > first)
        left = sum(end - start for start, end in kept) * self.layers * self.top_k * self.width
        return self._replace(spans=kept, ids=self.ids[len(self.ids) - left :]) if left else None

    def places(self) -> np.ndarray:
        """The positions of the tokens that have experts, as ascending int64."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(start, end) for start, end in self.spans)])


def routed_fault(routed: RoutedExperts, tokens: int) -> str | None:
    """Why no model can have routed a trajectory of ``tokens`` tokens like this, or None if nothing is wrong."""
    at = 0
    for start, end in routed.spans:
        if not at <= start < end <= tokens:
            return f"routed tokens {start} to {end} are empty, out of order or beyond the last token"
        at = end
    if len(routed.ids) != routed.tokens * routed.layers * routed.top_k * routed.width:
        return (
            f"{len(routed.ids)} bytes of experts for {routed.tokens} tokens, {routed.layers} layers and {routed.top_k}"
            " experts a token"
        )
    if routed.top_k == 1:
        return None
    ids = routed.array()
    chosen = (ids[..., 1:] > ids[..., :-1]).all(-1)
    none = ~ids.any((0, 2))
    if not (chosen | none).all():
        return "experts of a token that are repeated, or do not ascend"
    return None


def shape_fault(routed: RoutedExperts, shape: ExpertShape, expert_layers: Sequence[int] = ()) -> str | None:
    """Why the experts cannot be those of a model with this shape, or None if they can. ``routed`` is valid by itself.
    ``expert_layers``: the layers known to have experts.
    """
    if (routed.layers, routed.top_k) != shape[:2]:
        return f"{routed.layers} layers with {routed.top_k} experts a token, and the model has {shape}"
    ids = routed.array()
    if ids.size and int(ids.max()) >= shape.experts:
        return f"an expert {int(ids.max())}, and the model has {shape}"
    if routed.top_k > 1 and not ids[:, list(expert_layers)].any((0, 2)).all():
        return "a layer of experts in which no token has any"
    return None


class RoutedTokens:
    """Collects the experts of a trajectory whose tokens are computed by several requests. Each token keeps the experts
    from the first request that returned them: the one whose logits gave the next token.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []
        self._parts: list[np.ndarray] = []

    def add(self, start: int, ids: np.ndarray) -> None:
        """Add the experts of the tokens from ``start`` on, tokens × layers × top_k of uint8 or uint16. Rows whose form
        differs from earlier ones are left out.
        """
        at = self._spans[-1][1] if self._spans else 0
        new = ids[max(0, at - start) :]
        start = max(start, at)
        other = bool(self._parts) and (new.shape[1:], new.dtype) != (self._parts[0].shape[1:], self._parts[0].dtype)
        if not len(new) or other:
            return
        if self._spans and start == at:
            self._spans[-1] = (self._spans[-1][0], start + len(new))
        else:
            self._spans.append((start, start + len(new)))
        self._parts.append(np.sort(new, axis=-1))

    def packed(self, most_bytes: int) -> RoutedExperts | None:
        """The collected experts, or None if there are none or they exceed ``most_bytes``."""
        if not self._parts or sum(part.nbytes for part in self._parts) > min(most_bytes, MAX_ROUTED_BYTES):
            return None
        ids = np.concatenate(self._parts)
        _, layers, top_k = ids.shape
        little = ids.astype(_DTYPES[ids.itemsize], copy=False)
        return RoutedExperts(layers, top_k, ids.itemsize, tuple(self._spans), little.tobytes())
