"""Training rows: the rollouts of a batch as a learner reads them, one row for each rollout. Pure.

Guarantees: a row holds only what the ledger accepts. A fault, a stale span, another task or temperature than the
group's, an evaluation, or a group without two results ends the step with IntegrityError before any row exists. A token
is learnt from only if the policy sampled it, the task's loss mask permits it, and another token precedes it in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from p2pcast.ground.errors import IntegrityError
from p2pcast.rollouts.kv_policy import KV_OF_ONE_VERSION
from p2pcast.rollouts.overlong import Overlong, overlong_of, paid
from p2pcast.rollouts.result import Result, Span, fault, reward_fault
from p2pcast.rollouts.routed_experts import ExpertShape, RoutedExperts, shape_fault
from trainer_node.learning.objective.advantages import AdvantageKind, group_advantages
from trainer_node.learning.objective.judged_tokens import JudgedTokens, in_turns, judged_tokens
from trainer_node.ledger.batch_cut import LEAST_SURVIVORS

if TYPE_CHECKING:
    from p2pcast.ledger_api.batch_client import RolloutBatch, RolloutGroup
    from p2pcast.rollouts.job import Group

NOT_SAMPLED = -1
"""In place of a version's step, for tokens of the prompt and of the environment."""
MIXED = -1
"""In place of a row's only version, where several versions or their KV caches took part."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One rollout of n tokens.

    ``token_ids`` (n,) int64. ``learnt`` (n,) bool: tokens that are learnt from, never the first. ``logprobs`` (n,)
    float32: the sampler's, natural logarithms, 0 where not sampled. ``advantages`` (n,) float32: the rollout's where
    learnt, else 0. ``versions`` (n,) int64: the step of the version that sampled the token, else NOT_SAMPLED.
    ``group``: the group's number in the batch. ``reward``: the ledger's, whatever ``overlong`` says. ``truncated``: the
    rollout ended at the limit of tokens. ``single_version``: the step of the one version that made the whole rollout
    with a KV cache of its own, else MIXED. ``routed``: the recorded experts of tokens, for router replay.
    ``sparse`` (n,) bool: tokens that sparse attention sampled; None: no token. ``judged``: for the guard of sparse
    attention.
    """

    token_ids: npt.NDArray[np.int64]
    learnt: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    temperature: float
    versions: npt.NDArray[np.int64]
    group: int
    reward: float
    truncated: bool
    single_version: int = MIXED
    routed: RoutedExperts | None = None
    sparse: npt.NDArray[np.bool_] | None = None
    judged: Sequence[JudgedTokens] = ()

    @classmethod
    def of_text(cls, token_ids: npt.NDArray[np.int64], learnt: npt.NDArray[np.bool_], group: int = 0) -> TrainingRow:
        """A text that no version sampled, at temperature 1. ``learnt``: its targets."""
        zeros, versions = np.zeros(len(token_ids), np.float32), np.full(len(token_ids), NOT_SAMPLED, np.int64)
        return cls(token_ids, learnt, zeros, zeros, 1.0, versions, group, 0.0, truncated=False)

    @classmethod
    def of_answer(
        cls, prompt: Sequence[int], token_ids: Sequence[int], logprobs: npt.NDArray[np.float32]
    ) -> TrainingRow:
        """A prompt with an answer that the version of step 0 sampled with sparse attention, at temperature 1, without a
        reward. ``logprobs`` (n,): the sampler's, of ``token_ids``.
        """
        ids = np.array([*prompt, *token_ids], np.int64)
        sampled, said = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
        said[sampled] = logprobs
        versions, advantages = np.where(sampled, 0, NOT_SAMPLED), np.zeros_like(said)
        return cls(ids, sampled, said, advantages, 1.0, versions, 0, 0.0, truncated=True, sparse=sampled)

    @property
    def tokens(self) -> int:
        """All tokens, those of the prompt and of the environment included."""
        return len(self.token_ids)

    @property
    def learnt_tokens(self) -> int:
        return int(np.count_nonzero(self.learnt))

    @property
    def oldest_version(self) -> int:
        """The step of the oldest version that sampled a token of the row."""
        return int(self.versions[self.versions != NOT_SAMPLED].min())


def rows_of(
    batch: RolloutBatch,
    *,
    kind: AdvantageKind,
    eps: float,
    overlong: Overlong,
    step: int,
    staleness: int,
    vocabulary: int,
    experts: ExpertShape | None = None,
    expert_layers: Sequence[int] = (),
    judged_staleness: int | None = None,
) -> list[TrainingRow]:
    """The rows of a batch: groups in their order, and a group's rollouts in theirs. ``kind``, ``eps``: of
    ``group_advantages``. ``step``: t, the learner's, in optimiser steps. ``staleness``: S, in optimiser steps.
    ``vocabulary``: number of token ids. ``experts``, ``expert_layers``: of a learner that replays routers. A row
    whose recorded experts do not fit them has none: no worker can stop a run by them. ``judged_staleness``: steps that
    a version may lie behind for its tokens to be judged by the guard, at most as ``in_turns`` says; None: no token is.

    Raises IntegrityError that names the job and the reason, for a batch that the ledger would not have cut.
    """
    overlong_of(overlong)
    rows: list[TrainingRow] = []
    for number, samples in enumerate(batch.groups):
        _check(samples, step - staleness, vocabulary)
        cut_off = [one.result.stop == "length" for one in samples.rollouts]
        rewards = paid([one.reward for one in samples.rollouts], cut_off, overlong)
        advantages = group_advantages(rewards, kind, eps)
        for one, cut, advantage in zip(samples.rollouts, cut_off, advantages, strict=True):
            learns = not (cut and overlong == "mask")
            row = _row(one.result, float(advantage), number, one.reward, learns=learns)
            if experts is not None:
                row = replace(row, routed=_routed(one.result, experts, expert_layers))
            rows.append(row)
    return rows if judged_staleness is None else _judged(batch, rows, step - judged_staleness)


def _judged(batch: RolloutBatch, rows: Sequence[TrainingRow], since: int) -> list[TrainingRow]:
    rollouts = [one for samples in batch.groups for one in samples.rollouts]
    found = [judged_tokens(one.result, since) for one in rollouts]
    # The ledger draws a batch's id when it cuts the batch.
    chosen = in_turns(found, [one.worker for one in rollouts], batch.id)
    return [replace(row, judged=judged) for row, judged in zip(rows, chosen, strict=True)]


def _check(samples: RolloutGroup, oldest_step: int, vocabulary: int) -> None:
    """Raises IntegrityError for a group that the ledger would not have put into a batch."""
    group = samples.group
    if len(samples.rollouts) < LEAST_SURVIVORS:
        raise IntegrityError(
            f"group {group.id.hex()} has {len(samples.rollouts)} results in its batch, and {LEAST_SURVIVORS} are needed"
        )
    for one in samples.rollouts:
        reason = _reason(one.result, group, oldest_step, vocabulary)
        reason = reason or reward_fault(one.reward)
        if reason is not None:
            raise IntegrityError(
                f"the result of job {one.result.job.hex()} is no training data: {reason}; the ledger must not put such"
                " a result into a batch"
            )


def _reason(result: Result, group: Group, oldest_step: int, vocabulary: int) -> str | None:
    if group.purpose != "train":
        return "its group is for evaluation"
    if result.task_hash != group.task_hash:
        return f"played by another task than the group's {group.task}"
    if result.temperature != group.temperature:
        return f"sampled at temperature {result.temperature}, not {group.temperature}"
    if result.temperature == 0:
        return "sampled greedily, at temperature 0, where log-probabilities are undefined"
    if detail := fault(result, vocabulary):
        return detail
    if result.oldest_step < oldest_step:
        return f"sampled at step {result.oldest_step}, and results of steps before {oldest_step} are stale"
    return None


def _routed(result: Result, experts: ExpertShape, expert_layers: Sequence[int]) -> RoutedExperts | None:
    found = result.routed_experts
    if found is None or shape_fault(found, experts, expert_layers) is not None:
        return None
    return found.since(_computed_alike(result.spans))


def _computed_alike(spans: Sequence[Span]) -> int:
    """The first token whose experts the last version still used. At a switch the new version computes the tokens before
    again, with experts that no answer returns; under ``keep`` it uses what the version before had computed.
    """
    for before, span in reversed(list(pairwise(spans))):
        if span.version != before.version and span.kv in KV_OF_ONE_VERSION:
            # The last token that an older version sampled is computed only after the switch.
            return before.end - 1
    return 0


def _row(result: Result, advantage: float, group: int, reward: float, *, learns: bool) -> TrainingRow:
    sampled = result.mask.astype(bool)
    learnt = sampled if result.loss_mask is None else result.loss_mask.astype(bool)
    learnt = learnt & learns
    # No position precedes the first token, so no logits predict it.
    learnt[0] = False
    versions = np.full(len(sampled), NOT_SAMPLED, np.int64)
    sparse = np.zeros(len(sampled), bool)
    for span in result.spans:
        versions[span.start : span.end] = span.version.step
        sparse[span.start : span.end] = span.version in result.sparse_versions
    versions[~sampled] = NOT_SAMPLED
    made_by = {span.version for span in result.spans}
    # Under ``keep`` an engine's cached prefixes outlive the version that computed them.
    alone = len(made_by) == 1 and all(span.kv in KV_OF_ONE_VERSION for span in result.spans)
    return TrainingRow(
        token_ids=result.token_ids.astype(np.int64),
        learnt=learnt,
        logprobs=result.logprobs.astype(np.float32),
        advantages=np.where(learnt, advantage, 0.0).astype(np.float32),
        temperature=result.temperature,
        versions=versions,
        group=group,
        reward=reward,
        truncated=result.stop == "length",
        single_version=result.oldest_step if alone else MIXED,
        sparse=sparse & sampled if result.sparse_versions else None,
    )
