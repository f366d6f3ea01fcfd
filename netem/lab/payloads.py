"""Bytes of one optimiser step's weights, as a whole state and as deltas in several formats, from encoding real weights
under real AdamW steps.

Formats:

- ``dense``: the whole state in bf16.
- ``naive``: a 32-bit index and the value of each changed word.
- ``sparrowrl``: SparrowRL section 5.1, as in ``netem.bench.codec_comparison.sparrowrl_format``.
- ``ours``: ``context``, with every byte decoded again and compared.
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
    """``sizes``: bytes by format, of all steps together. ``changed_share``: changed share of the words in one step."""

    sizes: dict[str, int]
    changed_share: float

    def shares(self) -> dict[str, float]:
        """Sizes as shares of the dense state."""
        return {name: size / self.sizes["dense"] for name, size in self.sizes.items()}


@cache
def measured(learning_rate: float, steps: int) -> Payloads:
    """Sizes over ``steps`` consecutive steps of a running training. Takes some seconds; needs torch, transformers and
    the pretrained weights. Raises LocalError.
    """
    from netem.bench.codec_comparison.comparison import sizes, trained_datasets

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
