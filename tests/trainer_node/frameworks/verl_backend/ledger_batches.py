"""Plays verl's trainer with verl's own data types: ``ledger_batches.py LEDGER BEARER FOLDER SIZE RUN…``.

RUN: ``HUB,FIRST,STEPS,GROUPS``. Each run is a trainer that begins again, and trains the steps FIRST + 1 to STEPS. The
batches are taken as the one-step-off trainer does, and verl's own code computes advantages. Prints a line for each
batch. A checkpoint is whole after step FIRST + 2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import extract_reward

from p2pcast.ground.errors import P2PCastError
from trainer_node.frameworks.ledger_steps import TRACKER
from trainer_node.frameworks.verl import LedgerAgentLoopManager

url, bearer, folder, samples, *runs = sys.argv[1:]
size = int(samples)
PROMPT, RESPONSE = 6, 5
ALGORITHM = {"use_kl_in_reward": False, "norm_adv_by_std_in_grpo": True}


def config(hub: str, **more: object) -> OmegaConf:
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": folder},
            "algorithm": ALGORITHM,
            "actor_rollout_ref": {
                "actor": {"checkpoint": {"async_save": False}},
                "rollout": {"n": size, "temperature": 1.0, "prompt_length": PROMPT, "response_length": RESPONSE} | more,
            },
            "p2pcast_ledger": {"url": url, "bearer_file": bearer, "hub_http": hub, "give_up_s": 5, "patience_s": 60},
        }
    )


def advantages(batch: DataProto, estimator: str, *, divided: bool) -> torch.Tensor:
    algorithm = OmegaConf.create(ALGORITHM | {"norm_adv_by_std_in_grpo": divided})
    found = compute_advantage(
        batch, adv_estimator=estimator, num_repeat=size, norm_adv_by_std_in_grpo=divided, config=algorithm
    )
    return found.batch["advantages"].clone()


async def batch_of(manager: LedgerAgentLoopManager, number: int, global_step: int, groups: int) -> DataProto:
    """The calls of verl's ``_async_gen_next_batch``, in their order."""
    uids = np.array([f"{number}-{group}" for group in range(groups)], dtype=object)
    prompts = DataProto.from_dict({"dummy_tensor": torch.zeros(groups, 1)}, non_tensors={"uid": uids})
    asked = DataProto.from_dict({"dummy": torch.zeros(groups, 1)}, non_tensors={"uid": uids})
    asked.meta_info["global_steps"] = global_step
    generated = await manager.generate_sequences(asked.repeat(size, interleave=True))
    batch = prompts.repeat(size, interleave=True).union(generated)
    rewards, _ = extract_reward(batch)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = rewards
    return batch


async def train(hub: str, first: int, steps: int, groups: int) -> None:
    manager = LedgerAgentLoopManager.create(config=config(hub), llm_client=None, reward_loop_worker_handles=None)
    for number in range(first, steps):
        # The trainer asks for the batch after the first while it still counts the first.
        batch = await batch_of(manager, number, max(first + 1, number), groups)
        tensors = batch.batch
        own, verls = advantages(batch, "p2pcast", divided=True), advantages(batch, "grpo", divided=False)
        said = {
            "step": number,
            **{
                name: tensors[name].tolist()
                for name in ("prompts", "responses", "response_mask", "attention_mask", "position_ids", "rm_scores")
            },
            "rollout_log_probs": tensors["rollout_log_probs"].tolist(),
            "own": own.tolist(),
            "own_undivided": advantages(batch, "p2pcast", divided=False).tolist(),
            "verls_undivided": verls.tolist(),
            "verls": advantages(batch, "grpo", divided=True).tolist(),
            "staleness": batch.non_tensor_batch["ledger_staleness"].tolist(),
            "timing": list(batch.meta_info["timing"]),
        }
        print(json.dumps(said))
        if number == first + 1:
            (Path(folder) / TRACKER).write_text(str(first + 2))
    refusals = {}
    changes: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.5},
        "size": {"n": size - 1},
        "length": {"response_length": 1},
    }
    for name, changed in changes.items():
        try:
            other = LedgerAgentLoopManager.create(config=config(hub, **changed))
            other._steps, other._step = manager._steps, steps - 1
            asked = DataProto.from_dict({"dummy": torch.zeros(groups * changed.get("n", size), 1)})
            asked.meta_info["global_steps"] = steps
            await other.generate_sequences(asked)
        except P2PCastError as error:
            refusals[name] = str(error)
    print(json.dumps(refusals))


for run in runs:
    where, *numbers = run.split(",")
    asyncio.run(train(where, *map(int, numbers)))
