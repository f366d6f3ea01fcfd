"""verl's rollouts from a ledger: one batch of the ledger for each step, in place of generation by verl's own engines.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=trainer_node.frameworks.verl.LedgerAgentLoopManager
    +p2pcast_ledger.url=http://127.0.0.1:7079

The manager takes the place of verl's ``AgentLoopManager``. Prompts of verl are placeholders: their number decides how
many groups a step has, and ``rollout.n`` how many samples a group has. The trainer gets token ids, masks,
log-probabilities and the ledger's rewards. The estimator ``p2pcast`` gives the ledger's advantages, also where a group
is short.

Guarantees: verl trains on accepted results alone. Each batch is trained at most once on the way to any checkpoint that
survives. Asking for a step says that the step before is trained; the one-step-off trainer asks one step early. After a
restart, batches that the loaded checkpoint does not contain are opened again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from p2pcast.ground.errors import UsageError
from trainer_node.frameworks.ledger_steps import (
    LedgerSettings,
    LedgerSteps,
    first_sampled,
    newest_version,
    tracked,
)

if TYPE_CHECKING:
    import torch
    from verl import DataProto

    from trainer_node.learning.objective.training_rows import TrainingRow

WHERE: Final = "p2pcast_ledger"
"""In verl's configuration, at the top."""
ESTIMATOR: Final = "p2pcast"
"""For ``algorithm.adv_estimator``."""
JOURNAL: Final = "p2pcast-ledger.json"
"""In verl's folder of checkpoints."""
EPS: Final = 1e-4


def settings_of(given: Mapping[str, Any] | None) -> LedgerSettings:
    """Of ``p2pcast_ledger`` in verl's configuration, whose keys are the fields. Raises UsageError naming the key."""
    found = dict(given or {})
    keys = [field.name for field in dataclasses.fields(LedgerSettings)]
    for key, value in found.items():
        if key not in keys:
            raise UsageError(f"{WHERE}.{key} is unknown: the keys are {', '.join(keys)}")
        kind = int | float if key.endswith("_s") else str | None
        if isinstance(value, bool) or not isinstance(value, kind):
            raise UsageError(f"{WHERE}.{key}={value!r} is no {'number' if key.endswith('_s') else 'text'}")
    if not found.get("url"):
        raise UsageError(f"{WHERE}.url is missing: give the ledger's URL")
    return LedgerSettings(**found)


class LedgerAgentLoopManager:
    """For ``rollout.agent.agent_loop_manager_class``. verl calls ``create`` once, and ``generate_sequences`` for each
    step.
    """

    def __init__(self, config: Any) -> None:
        from omegaconf import OmegaConf

        rollout = config.actor_rollout_ref.rollout
        given = config.get(WHERE)
        self._settings = settings_of(None if given is None else OmegaConf.to_container(given, resolve=True))
        self._prompt, self._response = int(rollout.prompt_length), int(rollout.response_length)
        self._size, self._temperature = int(rollout.n), float(rollout.temperature)
        self._checkpoints = Path(config.trainer.default_local_dir)
        _check(config)
        self._steps: LedgerSteps | None = None
        self._step = 0
        """Of the next batch."""
        self._saved: int | None = None
        """The newest checkpoint that the ledger knows, or that an earlier run has left behind."""

    @classmethod
    def create(cls, config: Any, *_: Any, **unused: Any) -> Self:
        """Of verl's arguments, ``config`` alone is used: workers have engines and rewards of their own. Raises
        UsageError.
        """
        register_estimator()
        return cls(config)

    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The batch of this step, a row for each of the prompts. Raises UsageError for a batch that does not fit, and
        RetryableError for a ledger without an answer or a batch.
        """
        if prompts.meta_info.get("validate", False):
            raise UsageError("the ledger plays evaluations itself: set trainer.test_freq=-1, val_before_train=false")
        return await asyncio.to_thread(self._generated, len(prompts), int(prompts.meta_info["global_steps"]))

    def _generated(self, count: int, global_step: int) -> DataProto:
        began = time.monotonic()
        if self._steps is None:
            # verl counts the step that it is about to train: one more than the steps that its weights have.
            self._begin(max(0, global_step - 1))
        assert self._steps is not None
        batch = self._steps.take(self._step, self._settings.patience_s)
        saved = tracked(self._checkpoints)
        if saved is not None and saved != self._saved and saved <= self._step:
            self._steps.acknowledge(saved)
            self._saved = saved
        rows = self._steps.rows(batch, temperature=self._temperature)
        self._step += 1
        places = placed(rows, count, self._size, batch.step)
        waited_s = time.monotonic() - began
        return data_of(places, self._prompt, self._response, batch.step, waited_s)

    def _begin(self, step: int) -> None:
        newest = newest_version(self._settings.hub_http)
        if newest.step != step:
            raise UsageError(
                f"the hub's newest version is {newest}, and verl begins at step {step}: p2pcast has to carry verl's"
                " weights, by rollout.checkpoint_engine.backend=p2pcast"
            )
        steps = LedgerSteps(self._settings.client(), self._checkpoints / JOURNAL)
        facts = steps.begin_by_journal(newest.branch, step, checkpoint=step > 0)
        if facts.staleness < 1:
            raise UsageError("verl asks one step early: give p2pcast ledger --staleness 1 or more")
        self._steps, self._step, self._saved = steps, step, tracked(self._checkpoints)


def _check(config: Any) -> None:
    """Raises UsageError for settings that would train something other than the ledger's batch."""
    if config.algorithm.get("use_kl_in_reward", False):
        raise UsageError("algorithm.use_kl_in_reward changes the ledger's rewards: use actor.use_kl_loss")
    checkpoint = config.actor_rollout_ref.actor.get("checkpoint") or {}
    if checkpoint.get("async_save", False):
        raise UsageError("actor.checkpoint.async_save=true: verl then does not say when a checkpoint is whole")


def placed(rows: Sequence[TrainingRow], count: int, size: int, step: int) -> list[tuple[TrainingRow, bool]]:
    """``count`` rows: verl takes each ``size`` of them for one group. With each, whether it is a filler: verl learns
    from no token of such a row, and its reward is the mean of its group. Raises UsageError.
    """
    groups: dict[int, list[TrainingRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    most = max(map(len, groups.values()))
    if len(groups) * size > count or most > size:
        raise UsageError(
            f"the ledger's batch of step {step} has {len(groups)} groups of up to {most} samples, and verl trains"
            f" {count // size} groups of {size} a step: set data.train_batch_size and rollout.n to --batch-groups and"
            " --group-size of p2pcast ledger"
        )
    found: list[tuple[TrainingRow, bool]] = []
    for number in range(count // size):
        # Groups without rows of their own are filled with copies of the others.
        own = groups.get(number, [])
        source = own or groups[number % len(groups)]
        filling = dataclasses.replace(source[0], reward=float(np.mean([row.reward for row in source])))
        found += [(row, False) for row in own] + [(filling, True)] * (size - len(own))
    return found


def data_of(
    places: Sequence[tuple[TrainingRow, bool]], prompt: int, response: int, step: int, waited_s: float
) -> DataProto:
    """In the form of verl's own agent loops: prompts are padded on the left to ``prompt`` tokens, and responses on the
    right to ``response`` tokens. Raises UsageError for a longer one.
    """
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    count, width = len(places), prompt + response
    ids, attention, mask = (torch.zeros(count, width, dtype=torch.int64) for _ in range(3))
    logprobs, scores = (torch.zeros(count, response) for _ in range(2))
    for number, (row, filler) in enumerate(places):
        begins = first_sampled(row)
        length = row.tokens - begins
        if begins > prompt or length > response:
            raise UsageError(
                f"a sample of step {step} has {begins} tokens before its response and {length} in it, and verl takes"
                f" {prompt} and {response}: raise data.max_prompt_length or data.max_response_length, or lower the"
                " ledger's limit of tokens"
            )
        here = slice(prompt - begins, prompt + length)
        ids[number, here] = torch.from_numpy(row.token_ids)
        attention[number, here] = 1
        if not filler:
            mask[number, prompt : prompt + length] = torch.from_numpy(row.learnt[begins:].astype(np.int64))
        logprobs[number, :length] = torch.from_numpy(row.logprobs[begins:])
        scores[number, length - 1] = row.reward
    oldest = np.array([row.oldest_version for row, _ in places])
    newest = np.array([int(row.versions.max()) for row, _ in places])
    return DataProto(
        batch=TensorDict(
            {
                "prompts": ids[:, :prompt],
                "responses": ids[:, prompt:],
                "response_mask": mask[:, prompt:],
                "input_ids": ids,
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "rollout_log_probs": logprobs,
                "rm_scores": scores,
            },
            batch_size=count,
        ),
        non_tensor_batch={
            "__num_turns__": np.full(count, 2, np.int32),
            "min_global_steps": oldest.astype(object),
            "max_global_steps": newest.astype(object),
            "ledger_staleness": step - oldest,
        },
        meta_info={"timing": {"p2pcast/ledger_wait": waited_s}, "reward_extra_keys": []},
    )


def register_estimator() -> None:
    """Registers ESTIMATOR with verl: the ledger's advantages of each group, fillers left out.
    ``algorithm.norm_adv_by_std_in_grpo=false``: without division by the standard deviation.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    if ESTIMATOR not in ADV_ESTIMATOR_REGISTRY:
        register_adv_est(ESTIMATOR)(group_advantages_of)


def group_advantages_of(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    config: Any = None,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [rows, response]. Rows without a token that is learnt from count in no group."""
    import torch

    from trainer_node.learning.objective.advantages import group_advantages

    divided = config is None or config.get("norm_adv_by_std_in_grpo", True)
    rewards = token_level_rewards.sum(1).double().numpy()
    learnt = response_mask.bool().any(1).numpy()
    found = np.zeros(len(rewards))
    for group in dict.fromkeys(index):
        members = [number for number, one in enumerate(index) if one == group and learnt[number]]
        if len(members) > 1:
            found[members] = group_advantages(rewards[members], "grpo" if divided else "dr_grpo", EPS)
    advantages = torch.from_numpy(found).float()[:, None] * response_mask
    return advantages, advantages
