"""The figures of one learner step, for the run's log. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from p2pcast.ledger_api.batch_client import Rollout, RolloutBatch
from trainer_node.learning.learner_step import ReplayEffect, StepReport
from trainer_node.learning.objective.training_rows import TrainingRow


def step_record(batch: RolloutBatch, rows: Sequence[TrainingRow], report: StepReport) -> dict[str, Any]:
    """``reward``: mean over all groups played, those without a gradient included. ``staleness``: rollouts by the
    learner steps between the batch and the oldest version of each. Its parts: steps that passed while a rollout was
    made (in flight), and while it waited for its batch (in queue). With router replay ``replayed_share`` is of all
    tokens, and ``replay_refused`` counts rollouts whose recorded experts are not of the model's shape.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    ages = Counter(batch.step - rollout.result.oldest_step for rollout in rollouts)
    queued = [batch.step - rollout.settled_step for rollout in rollouts]
    count = max(1, len(rollouts))
    in_queue = sum(queued) / count
    return {
        "groups": len(batch.groups),
        "groups_played": batch.groups_played,
        "rollouts": len(rollouts),
        "reward": batch.mean_reward,
        "tokens": sum(len(row.token_ids) for row in rows),
        "learnt_tokens": sum(int(row.learnt.sum()) for row in rows),
        "truncated": sum(row.truncated for row in rows),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "skipped_updates": report.skipped,
        "staleness": {str(age): number for age, number in sorted(ages.items())},
        "staleness_in_queue": in_queue,
        "staleness_in_flight": sum(age * number for age, number in ages.items()) / count - in_queue,
        **report.statistics.document(),
        **({} if report.replay is None else _replay(rollouts, rows, report.replay)),
    }


def _replay(rollouts: Sequence[Rollout], rows: Sequence[TrainingRow], effect: ReplayEffect) -> dict[str, Any]:
    routed = [row.routed for row in rows if row.routed is not None]
    return {
        "replayed_share": sum(one.tokens for one in routed) / max(1, sum(row.tokens for row in rows)),
        "replay_refused": sum(one.result.routed_experts is not None for one in rollouts) - len(routed),
        "kl_replayed": effect.kl_replayed,
        "kl_own_routing": effect.kl_own_routing,
    }
