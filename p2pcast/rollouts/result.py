"""Results: a trajectory, token by token, and how it was made.

A trajectory is flat: ``token_ids`` has the prompt, then each turn of the policy and each answer of the environment in
turn. ``mask`` is 1 for tokens that the policy sampled. ``logprobs`` are those of the sampling distribution, and 0
where the mask is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

import numpy as np

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import SPAN_KVS
from p2pcast.rollouts.record_form import RolloutRecord, record
from p2pcast.rollouts.rollout_fields import (
    MAX_SPANS,
    MAX_TURNS,
    Array,
    Count,
    Hash,
    Id,
    Logprobs,
    Mask,
    Real,
    Temperature,
    TokenIds,
)
from p2pcast.rollouts.routed_experts import RoutedExperts, routed_fault
from p2pcast.rollouts.top_logprobs import TopLogprobs, top_fault
from p2pcast.sparse.budget_schedule import ALL_PAGES_NAME
from p2pcast.wire.constraints import AtMost, OneOf, Text

MAX_RESULT_BYTES = 16 * limits.MIB
_TOKEN_BYTES = 10
"""Bytes of a token's id, mask, loss mask and log-probability."""
_OTHER_BYTES = limits.MIB
"""Bytes reserved for spans, turns and tags."""

MAX_REWARD = 1e9
"""Largest absolute value of a reward, so that sums of a group's squares stay far below the largest float."""

Tags: TypeAlias = Annotated[Sequence[tuple[Annotated[str, Text(64)], Annotated[str, Text(256)]]], AtMost(64)]


def reward_fault(reward: float) -> str | None:
    """Why a number is not a valid reward: an infinite or huge one would spoil the advantages of its whole group."""
    if math.isfinite(reward) and abs(reward) <= MAX_REWARD:
        return None
    return f"a reward of {reward:g}, and rewards are from -{MAX_REWARD:g} to {MAX_REWARD:g}"


class Span(NamedTuple):
    """Tokens [``start``, ``end``) that one version sampled. ``manifest``: hash of the version's signed manifest.
    ``kv``: the engine's policy for its KV cache when it committed the version.
    """

    version: Version
    start: Count
    end: Count
    manifest: Hash
    kv: Annotated[str, OneOf(SPAN_KVS)]


@record("result", MAX_RESULT_BYTES)
class Result(RolloutRecord):
    """A worker's answer to a lease. ``turns``: where each turn of the policy begins. ``loss_mask``: 1 for tokens that
    are trained on; None for ``mask``. ``tags``: the task's, for reports. ``reward``: only for reports; the ledger
    computes its own. ``schedules``: those versions of the spans that sampled with sparse attention, with the BLAKE3 of
    the schedule's file; None for dense attention. ``routed_experts``: for a mixture of experts, if the engine returns
    them. ``top_logprobs``: for a share of the rollouts that sparse attention sampled.
    """

    job: Id
    lease: Id
    task_hash: Hash
    token_ids: TokenIds
    mask: Mask
    logprobs: Logprobs
    spans: Annotated[Sequence[Span], AtMost(MAX_SPANS)]
    temperature: Temperature
    reward: Annotated[float, Real()]
    stop: Annotated[str, OneOf(("end", "length", "task"))]
    turns: Annotated[np.ndarray, Array("<u4", MAX_TURNS)] | None = None
    loss_mask: Mask | None = None
    tags: Tags | None = None
    schedules: Annotated[Sequence[tuple[Version, Hash]], AtMost(MAX_SPANS)] | None = None
    routed_experts: RoutedExperts | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.mask))

    @property
    def sparse_versions(self) -> frozenset[Version]:
        """Versions whose tokens sparse attention sampled; a schedule of all pages is dense."""
        return frozenset(version for version, name in self.schedules or () if name != ALL_PAGES_NAME)

    @property
    def oldest_step(self) -> int:
        """The step of the oldest span's version."""
        return min(span.version.step for span in self.spans)


def routed_room(tokens: int) -> int:
    """How many bytes a result with this many tokens has left for routed experts."""
    return max(0, MAX_RESULT_BYTES - _OTHER_BYTES - _TOKEN_BYTES * tokens)


def fault(result: Result, vocabulary: int) -> str | None:
    """Why no engine can have made a result, or None if it is valid. ``vocabulary``: number of token ids."""
    count = len(result.token_ids)
    if not count == len(result.mask) == len(result.logprobs):
        return f"{count} token ids, {len(result.mask)} mask values and {len(result.logprobs)} log-probabilities"
    if result.loss_mask is not None and len(result.loss_mask) != count:
        return f"{count} token ids and {len(result.loss_mask)} values of the loss mask"
    if count and int(result.token_ids.max()) >= vocabulary:
        return f"a token id outside the vocabulary of {vocabulary}"
    masks = [result.mask] if result.loss_mask is None else [result.mask, result.loss_mask]
    if any(len(mask) and int(mask.max()) > 1 for mask in masks):
        return "a mask value other than 0 and 1"
    sampled = result.mask.astype(bool)
    if not sampled.any():
        return "no token was sampled"
    if result.loss_mask is not None and bool((result.loss_mask > result.mask).any()):
        return "the loss mask has a token that was not sampled"
    if not np.isfinite(result.logprobs).all() or bool((result.logprobs > 0).any()):
        return "a log-probability that is above 0 or not finite"
    if result.logprobs[~sampled].any():
        return "a log-probability of a token that was not sampled"
    scheduled = {version for version, _ in result.schedules or ()}
    if not scheduled <= {span.version for span in result.spans}:
        return "a schedule of a version that sampled no token"
    if len(scheduled) < len(result.schedules or ()):
        return "two schedules of one version"
    if result.routed_experts is not None and (detail := routed_fault(result.routed_experts, count)) is not None:
        return detail
    if result.top_logprobs is not None and (detail := top_fault(result.top_logprobs, sampled, vocabulary)) is not None:
        return detail
    return _span_fault(result, sampled)


def _span_fault(result: Result, sampled: np.ndarray) -> str | None:
    """Check that the spans ascend, begin and end with a sampled token, and contain every sampled token."""
    at, covered = 0, 0
    for span in result.spans:
        if not at <= span.start < span.end <= len(sampled):
            return f"span {span.start} to {span.end} is empty, out of order or beyond the last token"
        if not (sampled[span.start] and sampled[span.end - 1]):
            return f"span {span.start} to {span.end} begins or ends with a token that was not sampled"
        covered += int(np.count_nonzero(sampled[span.start : span.end]))
        at = span.end
    if covered != np.count_nonzero(sampled):
        return "sampled tokens outside all spans"
    return None
