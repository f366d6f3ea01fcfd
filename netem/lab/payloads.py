"""How many bytes one optimiser step's weights are, as a whole and as deltas of several formats: from really encoding real weights under real AdamW steps.

Formats: ``dense`` (the whole state in bf16), ``naive`` (a 32-bit index and the value of each changed word), ``sparrowrl`` (SparrowRL section 5.1, as ``p2pcast.bench.sparrowrl``
has it) and ``ours`` (``context``, of which every byte was decoded again and compared).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

FORMATS: Final = ("dense", "naive", "sparrowrl", "ours")
INDEX_BYTES: Final = 4
VALUE_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Payloads:
    """``sizes``: bytes by format, of all steps together. ``changed_share``: of the words of a step."""

    sizes: dict[str, int]
    changed_share: float

    def shares(self) -> dict[str, float]:
        """Of the dense state."""
        return {name: size / self.sizes["dense"] for name, size in self.sizes.items()}


@cache
def measured(learning_rate: float, steps: int) -> Payloads:
    """Of so many steps in a row of a run in progress. Some seconds; needs torch, transformers and the pretrained weights. Raises LocalError."""
    from p2pcast.bench.codec import sizes, trained_datasets

    (dataset,) = trained_datasets((learning_rate,), steps)
    row = sizes(dataset, "context")
    return Payloads(
        {
            "dense": row["dense_bytes"],
            "naive": row["changed"] * (INDEX_BYTES + VALUE_BYTES),
            "sparrowrl": row["sparrowrl_bytes"],
            "ours": row["bytes"],
        },
        row["changed"] / row["params"],
    )
