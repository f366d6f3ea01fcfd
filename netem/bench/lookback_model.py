"""A small model, really trained, that looks far back: of task ``recall``, for measurements of sparse attention.

Sparse attention keeps layers 0 and 1 dense. So the look-back has to happen in later layers: layers 0 and 1 are trained
with a narrow window, which is opened at the end. Three things make the training fit into minutes of one core:

- The first weights compare a token with the predecessors of others, and copy what they find. This is an induction head
  before training; the method is that of mimetic initialisation (Trockman and Kolter, 2023).
- Keys that a text has stated before are learnt in the text too, besides those of the answer.
- Contexts grow by stages. Positions skip ahead at random between statements, so that short texts teach long distances
  (PoSE, Zhu et al., 2024).

Promise: equal stages and seeds give equal weights on one machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from netem.rollouts.small_model import SmallModel, write_model
from p2pcast.tasks.trial_tasks.recall import FIRST_KEY, FIRST_VALUE, VALUES, VOCABULARY, Recall

logger = logging.getLogger("p2pcast.bench")

HEAD: Final = 64
LONGEST: Final = 16384
FORM: Final = SmallModel(
    VOCABULARY, hidden=2 * HEAD, layers=6, head=HEAD, mlp=1, positions=LONGEST, spread=0.06, tied=True, rope_theta=1e8
)
ASKED: Final = 10
"""Keys asked for. The model finds the next one by its distance too, so that other numbers do not fit it."""
LOCAL_LAYERS: Final = 2
"""Layers with a window: those that sparse attention keeps dense."""
WARMUP_STEPS: Final = 25
LOG_EVERY: Final = 25


class Stage(NamedTuple):
    """``batch``: texts of a step. ``window``: tokens that layers 0 and 1 see; None: all. ``reach``: longest position in
    tokens; positions skip if it exceeds the text. The rest as of the task.
    """

    steps: int
    batch: int
    tokens: int
    spacing: int
    window: int | None
    reach: int = 0
    lr: float = 1e-3


STAGES: Final = (
    Stage(80, 12, 120, 2, 2, lr=1.5e-3),
    Stage(80, 8, 200, 4, 4, 1024, lr=1.5e-3),
    Stage(80, 4, 512, 12, 8, 4096),
    Stage(80, 4, 512, 16, 32, 8192),
    Stage(140, 4, 512, 16, None, 4096),
    Stage(40, 1, 2048, 16, None, 8192, lr=6e-4),
    Stage(20, 1, 4096, 16, None, 8192, lr=3e-4),
)


class Answered(NamedTuple):
    """Share of the answers' tokens that are the most probable ones, at temperature 0 after right tokens."""

    keys: float
    values: float


def train_lookback(stages: Sequence[Stage] = STAGES, *, seed: int = 1, model: Qwen3ForCausalLM | None = None) -> Any:
    """``model``: to train on; None: a new one. Returns the model in fp32."""
    torch.manual_seed(seed)
    model = model or first_model()
    skips = np.random.default_rng(seed)
    for number, stage in enumerate(stages):
        task = Recall(stage.tokens, ASKED, stage.spacing)
        texts = _texts(task, seed + number)
        optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(stage.steps):
            began = time.monotonic()
            ids, answer = _batch(texts, stage.batch)
            positions = skipping(task, stage.reach, ids.shape, skips)
            scores = _scores(model, ids[:, :-1], positions[:, :-1], stage.window)
            said = ids[:, 1:]
            loss = torch.nn.functional.cross_entropy(*((x[learnt(ids, answer)]) for x in (scores, said)))
            rate = stage.lr * min(1.0, (step + 1) / WARMUP_STEPS)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % LOG_EVERY == LOG_EVERY - 1 or step == stage.steps - 1:
                found = _answered(scores, said, answer)
                logger.info(
                    "stage %d, step %d of %d: loss %.3f, keys %.2f, values %.2f; %.2f s a step",
                    number, step + 1, stage.steps, loss.item(), *found, time.monotonic() - began,
                )  # fmt: skip
    return model


def first_model() -> Qwen3ForCausalLM:
    """The model before training, drawn from torch's random state.

    Embeddings lie in one half of the hidden space. Layer 0 copies the window's mean into the other half. Later layers
    compare: even ones this token, odd ones this token's predecessors, each with the predecessors of earlier tokens.
    """
    model = FORM.made("bfloat16")
    halves = _orthogonal(2 * HEAD)
    own, before = halves[:HEAD], halves[HEAD:]
    with torch.no_grad():
        kinds = 0.5 * _orthogonal(HEAD)[:2] @ own
        embeddings = torch.randn(VOCABULARY, HEAD) / HEAD**0.5 @ own
        embeddings[FIRST_VALUE : FIRST_VALUE + VALUES] += kinds[0]
        embeddings[FIRST_KEY:] += kinds[1]
        model.model.embed_tokens.weight.copy_(embeddings)
        for number, layer in enumerate(model.model.layers):
            attention: Any = layer.self_attn
            layer.mlp.down_proj.weight.mul_(0.1)
            attention.o_proj.weight.mul_(0.1)
            if number == 0:
                attention.v_proj.weight.copy_(own)
                attention.o_proj.weight[:, :HEAD] = 0.15 * before.T
                attention.q_norm.weight.fill_(0.5)
                attention.k_norm.weight.fill_(0.5)
            if number >= LOCAL_LAYERS:
                turned = _orthogonal(HEAD)
                attention.k_proj.weight.copy_(turned @ before)
                attention.q_proj.weight.copy_(torch.cat([turned @ (before if number % 2 else own)] * 2))
                if number % 2:
                    shared = torch.randn(HEAD) / HEAD**0.5
                    attention.q_proj.weight.add_(torch.cat([torch.outer(shared, 2 * kinds[0])] * 2))
                    attention.k_proj.weight.add_(torch.outer(shared, 2 * kinds[1]))
                for weight in (attention.k_proj.weight, attention.q_proj.weight):
                    weight.add_(0.03 * torch.randn_like(weight))
                attention.q_norm.weight.fill_(2.0)
                attention.k_norm.weight.fill_(2.0)
                copied = _orthogonal(HEAD) @ own
                attention.v_proj.weight.copy_(copied)
                attention.o_proj.weight.copy_(0.08 * torch.cat([copied.T] * 2, 1))
    return model


def accuracy(model: Qwen3ForCausalLM, task: Recall, *, texts: int, seed: int) -> Answered:
    """Of ``texts`` new prompts, with dense attention in all layers."""
    found = []
    drawn = _texts(task, seed)
    for _ in range(texts):
        ids, answer = _batch(drawn, 1)
        with torch.no_grad():
            scores = _scores(model, ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], None)
        found.append(_answered(scores, ids[:, 1:], answer))
    return Answered(*np.mean(found, axis=0).tolist())


def write_lookback(folder: Path, model: Qwen3ForCausalLM) -> Path:
    return write_model(folder, model, dtype="bfloat16")


def _orthogonal(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size))[0]


def _texts(task: Recall, seed: int) -> Iterator[tuple[np.ndarray, int]]:
    """Each with the place of its answer."""
    for one in task.demonstrations(seed):
        yield one.token_ids.astype(np.int64), int(one.mask.argmax())


def _batch(texts: Iterator[tuple[np.ndarray, int]], count: int) -> tuple[torch.Tensor, int]:
    """Token ids of shape (count, tokens), and the place of the answers."""
    ids, places = zip(*islice(texts, count), strict=True)
    return torch.from_numpy(np.stack(ids)), places[0]


def skipping(task: Recall, reach: int, shape: Sequence[int], skips: np.random.Generator) -> torch.Tensor:
    """Positions up to ``reach``, of ``shape``: texts, tokens. Skips lie between the cells of a text, each with one
    statement, and before the asked keys.
    """
    texts, tokens = shape
    steps = np.ones((texts, tokens), np.int64)
    steps[:, 0] = 0
    if reach > tokens:
        cells = np.arange(1 + task.spacing, tokens - 3 * task.asked - 2, task.spacing)
        shares = skips.dirichlet(np.full(len(cells), 0.3), texts)
        skipped = (reach - tokens) ** skips.random((texts, 1))
        steps[:, cells] += (shares * skipped).astype(np.int64)
    return torch.from_numpy(steps.cumsum(axis=1))


def learnt(ids: torch.Tensor, answer: int) -> torch.Tensor:
    """The answer, and in the text the values of keys that were stated before; of shape (texts, tokens - 1)."""
    said = ids[:, 1:]
    again = np.zeros(tuple(said.shape), bool)
    for row, found in zip(ids.numpy(), again, strict=True):
        _, first = np.unique(row, return_index=True)
        new = np.zeros(len(row), bool)
        new[first] = True
        found[:] = (~new & (row >= FIRST_KEY))[:-1]
    chosen = torch.from_numpy(again) & (said >= FIRST_VALUE) & (said < FIRST_VALUE + VALUES)
    chosen[:, answer - 1 :] = True
    return chosen


def _scores(model: Qwen3ForCausalLM, ids: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """Logits of the next tokens, of shape (texts, tokens, vocabulary)."""
    kinds = ["full_attention"] * FORM.layers
    masks: dict[str, torch.Tensor | None] = {"full_attention": None}
    if window is not None:
        kinds[:LOCAL_LAYERS] = ["sliding_attention"] * LOCAL_LAYERS
        back = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
        masks["sliding_attention"] = ((back >= 0) & (back < window))[None, None]
    kept, model.config.layer_types = model.config.layer_types, kinds
    try:
        # Masks are given, since transformers would take skipping positions for packed texts.
        found = model(input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=False)
    finally:
        model.config.layer_types = kept
    logits: torch.Tensor = found.logits
    return logits


def _answered(scores: torch.Tensor, said: torch.Tensor, answer: int) -> Answered:
    right = (scores.argmax(-1) == said)[:, answer - 1 : -1].float()
    return Answered(right[:, 0::2].mean().item(), right[:, 1::2].mean().item())
