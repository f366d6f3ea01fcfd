"""Micro-batches: rows as tensors, in parts that fit into memory, and dealt to ranks. No I/O, clock or randomness.

Token t of a row is predicted from position t - 1 of the same row. Each flat tensor of a micro-batch has one entry for
each learnt token, its target, and ``logit_positions`` says where the target's logits are:

    packed    input_ids   a0 a1 a2 b0 b1        one row behind the other, (1, N)
              positions    0  1  2  0  1        the restart at 0 separates rows: no attention mask
    padded    input_ids   a0 a1 a2              one row below the other, (B, T), padded on the right
                          b0 b1  -
    learnt    a1 b1
    targets               a1 b1
    logit_positions        0  3                 of (B * T) flattened positions; in both forms here

Guarantees: rows are whole, and a row without a learnt token is left out. The first token of a row and padding have no
flat entry. Each rank has equally many micro-batches. Equal rows give equal micro-batches in any process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.routed_experts import RoutedExperts
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow

Packing = Literal["packed", "padded"]
NumberedRow: TypeAlias = tuple[int, TrainingRow]
"""A row and its number among the rows of the update, those of all ranks."""
PADDING_ID = 0
"""Token id at positions of padding; any id of the vocabulary would do."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows for one forward and backward pass: B sequences of T positions, M targets.

    ``input_ids``, ``position_ids`` (B, T) int64. ``attention_mask`` (B, T) int64, 1 at tokens and 0 at padding; None if
    packed. ``logit_positions`` (M,) int64: of B * T flattened positions, the one whose logits predict the target.
    ``targets`` (M,) int64. ``sampler_logprobs``, ``advantages``, ``temperatures`` (M,) float32. ``learnt`` (M,) bool:
    True, but for the one target of an empty micro-batch. ``versions`` (M,) int64: the step of the version that sampled
    the target. ``sparse`` (M,) bool: whether sparse attention sampled it. ``single_versions`` (M,) int64:
    ``single_version`` of the target's row. ``rows`` (M,) int64: number of the target's row. ``tokens``: number of
    tokens without padding. ``routed``: the recorded experts of rows that have any, with the flattened position of the
    row's first token. ``sparse_versions`` (B, T) int64: at positions that an engine decoded by sparse attention, the
    step of the version that did; NOT_SAMPLED elsewhere.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    logit_positions: torch.Tensor
    targets: torch.Tensor
    sampler_logprobs: torch.Tensor
    advantages: torch.Tensor
    learnt: torch.Tensor
    temperatures: torch.Tensor
    versions: torch.Tensor
    sparse: torch.Tensor
    single_versions: torch.Tensor
    rows: torch.Tensor
    tokens: int
    sparse_versions: torch.Tensor
    routed: tuple[tuple[int, RoutedExperts], ...] = ()

    def weights(self, by_row: torch.Tensor) -> torch.Tensor:
        """Weights of the targets, (M,), from weights by row number, (R,); 0 where not learnt."""
        weights = by_row.new_zeros(self.learnt.shape)
        weights[self.learnt] = by_row[self.rows[self.learnt]]
        return weights


def deal(rows: Sequence[TrainingRow], ranks: int) -> list[list[NumberedRow]]:
    """The rows of each of ``ranks`` ranks, with about equal numbers of tokens: the longest row first, each to the rank
    with the fewest tokens. Rows of one rank keep their order. Raises UsageError for less than one rank.
    """
    if ranks < 1:
        raise UsageError(f"rows cannot be dealt to {ranks} ranks")
    dealt: list[list[NumberedRow]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    costs = [row.tokens if row.learnt_tokens else 0 for row in rows]
    for number in sorted(range(len(rows)), key=lambda number: (-costs[number], number)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        dealt[rank].append((number, rows[number]))
        loads[rank] += costs[number]
    return [sorted(part, key=lambda numbered: numbered[0]) for part in dealt]


def micro_batches(
    dealt: Sequence[Sequence[NumberedRow]], rank: int, most_tokens: int, packing: Packing
) -> list[MicroBatch]:
    """The micro-batches of ``rank``, of rows that ``deal`` has dealt: at most ``most_tokens`` tokens each, padding
    included, or one longer row. A rank with fewer micro-batches than another gets empty ones, and all get at least one:
    collective calls of sharded models need equally many passes on each rank.

    ``packed`` needs a model that separates rows by ``position_ids`` alone, as transformers' attention does without an
    attention mask; recurrent layers do not. Raises UsageError for a limit below 1, and an unknown form.
    """
    if most_tokens < 1:
        raise UsageError(f"a micro-batch of at most {most_tokens} tokens holds no row")
    if packing not in ("packed", "padded"):
        raise UsageError(f"no form of micro-batches is named {packing!r}: use packed or padded")
    bins = [_bins([one for one in part if one[1].learnt_tokens], most_tokens, packing) for part in dealt]
    made = _packed if packing == "packed" else _padded
    mine = [made(chosen) for chosen in bins[rank]]
    count = max(1, *map(len, bins))
    return mine + [_empty(packing) for _ in range(count - len(mine))]


def _bins(rows: Sequence[NumberedRow], most_tokens: int, packing: Packing) -> list[list[NumberedRow]]:
    """First fit, the longest row first."""
    bins: list[list[NumberedRow]] = []
    for numbered in sorted(rows, key=lambda numbered: (-numbered[1].tokens, numbered[0])):
        for chosen in bins:
            lengths = [row.tokens for _, row in (*chosen, numbered)]
            if (sum(lengths) if packing == "packed" else max(lengths) * len(lengths)) <= most_tokens:
                chosen.append(numbered)
                break
        else:
            bins.append([numbered])
    return [sorted(chosen, key=lambda numbered: numbered[0]) for chosen in bins]


def _empty(packing: Packing) -> MicroBatch:
    """Two tokens, and one target that is not learnt: loss and gradients are exactly 0, and every parameter has one."""
    two = np.full(2, PADDING_ID, np.int64)
    return _made(
        [(0, TrainingRow(two, two > 0, two.astype("f4"), two.astype("f4"), 1.0, two + NOT_SAMPLED, 0, 0.0, False))],
        input_ids=two[None],
        position_ids=np.arange(2)[None],
        attention_mask=None if packing == "packed" else np.ones((1, 2), np.int64),
        starts=[0],
        places=[np.array([1])],
    )


def _packed(rows: Sequence[NumberedRow]) -> MicroBatch:
    ends = np.cumsum([row.tokens for _, row in rows])
    return _made(
        rows,
        input_ids=np.concatenate([row.token_ids for _, row in rows])[None],
        position_ids=np.concatenate([np.arange(row.tokens) for _, row in rows])[None],
        attention_mask=None,
        starts=[0, *ends[:-1].tolist()],
        places=_learnt_places(rows),
    )


def _padded(rows: Sequence[NumberedRow]) -> MicroBatch:
    width = max(row.tokens for _, row in rows)
    input_ids = np.full((len(rows), width), PADDING_ID, np.int64)
    attention_mask = np.zeros((len(rows), width), np.int64)
    for at, (_, row) in enumerate(rows):
        input_ids[at, : row.tokens] = row.token_ids
        attention_mask[at, : row.tokens] = 1
    return _made(
        rows,
        input_ids=input_ids,
        position_ids=np.tile(np.arange(width), (len(rows), 1)),
        attention_mask=attention_mask,
        starts=[width * at for at in range(len(rows))],
        places=_learnt_places(rows),
    )


def _learnt_places(rows: Sequence[NumberedRow]) -> list[np.ndarray]:
    return [np.flatnonzero(row.learnt[1:]) + 1 for _, row in rows]


def _made(
    rows: Sequence[NumberedRow],
    *,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    attention_mask: np.ndarray | None,
    starts: Sequence[int],
    places: Sequence[np.ndarray],
) -> MicroBatch:
    """``starts``: of each row, the flattened position of its first token. ``places``: of its targets, within it."""
    counts = [len(place) for place in places]

    def of_tokens(values: Callable[[TrainingRow], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(
            np.concatenate([values(row)[place] for (_, row), place in zip(rows, places, strict=True)])
        )

    def of_rows(values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        attention_mask=None if attention_mask is None else torch.from_numpy(attention_mask),
        logit_positions=torch.from_numpy(
            np.concatenate([start + place - 1 for start, place in zip(starts, places, strict=True)])
        ),
        targets=of_tokens(lambda row: row.token_ids),
        sampler_logprobs=of_tokens(lambda row: row.logprobs),
        advantages=of_tokens(lambda row: row.advantages),
        learnt=of_tokens(lambda row: row.learnt),
        temperatures=of_rows([row.temperature for _, row in rows], np.float32),
        versions=of_tokens(lambda row: row.versions),
        sparse=of_tokens(lambda row: np.zeros(row.tokens, bool) if row.sparse is None else row.sparse),
        single_versions=of_rows([row.single_version for _, row in rows], np.int64),
        rows=of_rows([number for number, _ in rows], np.int64),
        tokens=sum(row.tokens for _, row in rows),
        sparse_versions=torch.from_numpy(_sparse_versions(rows, starts, input_ids.shape)),
        routed=tuple(
            (start, row.routed) for start, (_, row) in zip(starts, rows, strict=True) if row.routed is not None
        ),
    )


def _sparse_versions(rows: Sequence[NumberedRow], starts: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    found = np.full(math.prod(shape), NOT_SAMPLED, np.int64)
    for start, (_, row) in zip(starts, rows, strict=True):
        if row.sparse is not None:
            sampled = row.versions != NOT_SAMPLED
            decoded = sampled[:-1] & row.sparse[1:] & sampled[1:]
            found[start : start + row.tokens - 1] = np.where(decoded, row.versions[1:], NOT_SAMPLED)
    return found.reshape(shape)
