"""The figures of a decoder that determine the cost of a token, from its ``config.json``. Pure.

Guarantee: a model whose layers this arithmetic does not describe is refused, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from p2pcast.ground.errors import UsageError

FIGURES: Final = "PARAMETERS:LAYERS:WIDTH:QUERIES"
"""Text form of the figures, for example ``4.02e9:36:1024:4``."""
_OTHER_LAYERS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
"""Configuration keys of models with experts or compressed keys."""


@dataclass(frozen=True, slots=True)
class ModelForm:
    """``parameters``: those that compute each token; the input embedding is only looked up. ``layers``: layers with
    attention. ``width``: size of one token's keys in one layer, in values. ``queries_per_key``: query heads per key
    head. Raises UsageError.
    """

    parameters: float
    layers: int
    width: int
    queries_per_key: float

    def __post_init__(self) -> None:
        numbers = (self.parameters, self.layers, self.width, self.queries_per_key)
        if not all(math.isfinite(one) and one > 0 for one in numbers):
            raise UsageError(f"all figures of a model are positive: {FIGURES}, not {':'.join(map(str, numbers))}")

    @classmethod
    def parse(cls, text: str) -> ModelForm:
        """Read figures in the form of FIGURES. Raises UsageError."""
        try:
            parameters, layers, width, queries = text.split(":")
            return cls(float(parameters), int(layers), int(width), float(queries))
        except ValueError:
            raise UsageError(f"{text!r}: write {FIGURES}, as in 4.02e9:36:1024:4") from None

    @classmethod
    def of_config(cls, config: Any) -> ModelForm:
        """Read a document in the form of ``transformers``: layers of full attention with a gated MLP. Biases and norms
        are neglected. Raises UsageError.
        """
        if not isinstance(config, Mapping):
            raise UsageError("the model's configuration is no JSON object")
        windows = config.get("sliding_window") and config.get("use_sliding_window", True)
        others = set(config.get("layer_types") or ()) - {"full_attention"}
        if windows or others or any(config.get(key) for key in _OTHER_LAYERS):
            raise UsageError(
                "the model has experts, windows or other layers than full attention with an MLP: state its figures as "
                f"{FIGURES}, with the parameters that compute one token"
            )
        hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        layers, key_heads = _count(config, "num_hidden_layers"), _count(config, "num_key_value_heads")
        head = _count(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
        attention = 2 * hidden * head * (heads + key_heads)
        mlp = 3 * hidden * _count(config, "intermediate_size")
        parameters = layers * (attention + mlp) + hidden * _count(config, "vocab_size")
        return cls(parameters, layers, key_heads * head, heads / key_heads)


def _count(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    if type(found) is not int or found < 1:
        raise UsageError(
            f"the model's configuration has no whole number above 0 as {key}: state the figures as {FIGURES}"
        )
    return found
