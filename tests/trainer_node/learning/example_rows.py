"""Results, batches and rows for tests of the learner's pure parts."""

from __future__ import annotations

import numpy as np

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Rollout, RolloutBatch, RolloutGroup
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.result import Result, Span
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow

VOCABULARY = 23
HASH = bytes(range(32))


def group(**changes) -> Group:
    fields = {
        "id": bytes([7]) * 16,
        "size": 4,
        "purpose": "train",
        "task": "sums",
        "task_hash": bytes(32),
        "prompt": b"12+30=",
        "seed": 1,
        "temperature": 1.0,
        "max_tokens": 8,
    }
    return Group(**{**fields, **changes})


def result(**changes) -> Result:
    """Three tokens of a prompt, two that version 0.3 sampled, one of the environment, two that version 0.4 sampled."""
    fields = {
        "job": bytes([9]) * 16,
        "lease": bytes([1]) * 16,
        "task_hash": bytes(32),
        "token_ids": np.array([5, 6, 7, 1, 2, 9, 3, 4], "<u4"),
        "mask": np.array([0, 0, 0, 1, 1, 0, 1, 1], "u1"),
        "logprobs": np.array([0, 0, 0, -0.5, -1.5, 0, -0.25, -3], "<f4"),
        "spans": (
            Span(Version(0, 3), 3, 5, HASH, "recompute"),
            Span(Version(0, 4), 6, 8, HASH, "recompute"),
        ),
        "temperature": 1.0,
        "reward": 0.5,
        "stop": "end",
    }
    return Result(**{**fields, **changes})


def batch(*groups: list[tuple[Result, float]], of: Group | None = None) -> RolloutBatch:
    """Each group: its results with the ledger's rewards."""
    samples = tuple(
        RolloutGroup(of or group(), tuple(Rollout(r, reward, worker="w", settled_step=5) for r, reward in rollouts))
        for rollouts in groups
    )
    return RolloutBatch(b"b" * 16, 5, samples, len(groups), 0.5)


def row(seed: int, tokens: int, *, learnt: list[int] | None = None, **changes) -> TrainingRow:
    """Random tokens. ``learnt``: places of learnt tokens; about half of them by default."""
    rng = np.random.default_rng(seed)
    sampled = rng.random(tokens) < 0.5
    if learnt is not None:
        sampled = np.isin(np.arange(tokens), learnt)
    sampled[0] = False
    fields = {
        "token_ids": rng.integers(0, VOCABULARY, tokens),
        "learnt": sampled,
        "logprobs": np.where(sampled, -3 * rng.random(tokens), 0).astype("f4"),
        "advantages": np.where(sampled, rng.normal(), 0).astype("f4"),
        "temperature": float(rng.choice([0.7, 1.0, 1.3])),
        "versions": np.where(sampled, rng.integers(0, 5, tokens), NOT_SAMPLED),
        "group": seed // 2,
        "reward": 0.0,
        "truncated": False,
    }
    return TrainingRow(**{**fields, **changes})
