"""Small Qwen3 models of random weights: large enough for built-in tasks, in folders that transformers and vLLM load.

    make_small_model(folder, Sums().vocabulary, seed=3)

Promise: equal arguments give equal bytes, and the random state of the surrounding program is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from p2pcast.ground.errors import UsageError

ROPE_THETA: Final = 10_000.0
UNKNOWN: Final = "w0"


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Form of a model; half as many heads for keys and values as for queries. ``head``: dimensions of a head. ``mlp``:
    width of the MLP as a multiple of ``hidden``. ``positions``: longest text in tokens. ``spread``: standard deviation
    of the first weights; a narrow model learns slowly from the usual 0.02 of wide models. ``rope_theta``: base of the
    rotations by position; with a large one more dimensions compare tokens alike at all distances.

    Raises UsageError for sizes that do not fit together.
    """

    vocabulary: int
    hidden: int = 128
    layers: int = 2
    head: int = 32
    mlp: int = 3
    positions: int = 512
    spread: float = 0.08
    tied: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    rope_theta: float = ROPE_THETA

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.hidden % (2 * self.head):
            raise UsageError(
                f"a small model of hidden size {self.hidden} cannot be made: give a multiple of {2 * self.head}, since"
                f" heads have {self.head} dimensions and share keys and values in pairs"
            )
        if min(self.vocabulary, self.layers) < 1:
            raise UsageError(f"a small model of {self.vocabulary} token ids and {self.layers} layers cannot be made")

    def made(self, dtype: Literal["float32", "bfloat16"] = "float32") -> Qwen3ForCausalLM:
        """A model in fp32, drawn from torch's random state. ``dtype``: of its folders, as its configuration states."""
        heads = self.hidden // self.head
        config = Qwen3Config(
            architectures=["Qwen3ForCausalLM"],
            dtype=dtype,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=self.head,
            max_position_embeddings=self.positions,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=self.tied,
            pad_token_id=self.pad_token_id,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
            initializer_range=self.spread,
        )
        return Qwen3ForCausalLM(config).float()


def make_small_model(
    folder: Path,
    vocabulary: int,
    *,
    hidden: int = 128,
    layers: int = 2,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write a model of the form above, of 0.4 million weights by default. Returns ``folder``. Raises UsageError."""
    return write_small_model(folder, SmallModel(vocabulary, hidden, layers), seed=seed, dtype=dtype)


def write_small_model(
    folder: Path, form: SmallModel, *, seed: int, dtype: Literal["float32", "bfloat16"] = "float32"
) -> Path:
    """Write a model of ``form``; words of its tokenizer, ``w0``, ``w1``, …, are the token ids. Returns ``folder``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = form.made(dtype)
    return write_model(folder, model, dtype=dtype)


def write_model(folder: Path, model: PreTrainedModel, *, dtype: Literal["float32", "bfloat16"]) -> Path:
    """Write ``model`` with a tokenizer as above. The model itself then has ``dtype``. Returns ``folder``."""
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN).save_pretrained(folder)
    return folder
