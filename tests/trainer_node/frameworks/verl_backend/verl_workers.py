"""Ray workers for the adapter's tests: verl's own actor and rollout workers, with a model of a few tensors on CPUs.

The actor is verl's, with an optimiser step on random tokens. The rollout worker is verl's, with an engine that holds a
model of transformers in place of vLLM.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

from trainer_node.frameworks.verl_backend.peer_wait import peer_status

Digests = dict[str, str]


def digest(tensor: torch.Tensor) -> str:
    """Of the tensor as bf16, whatever its dtype is."""
    words = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(f"{tuple(tensor.shape)}".encode() + words.numpy().tobytes()).hexdigest()


def memory_bytes(kind: str) -> int:
    """``VmRSS``, or the peak ``VmHWM``, of this process."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(kind))) * 1024


class Actor(ActorRolloutRefWorker):
    """verl's actor, which also takes optimiser steps, and tells of its weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """One step on random tokens, which are the same on all ranks."""
        engine = self.actor.engine
        torch.manual_seed(seed)
        tokens = torch.randint(engine.module.config.vocab_size, (2, 8))
        engine.optimizer.zero_grad()
        engine.module(input_ids=tokens, labels=tokens).loss.backward()
        engine.optimizer.step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> Digests:
        weights, _ = self.actor.engine.get_per_tensor_param()
        return {name: digest(tensor) for name, tensor in weights}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> tuple[int, int]:
        """Resident and peak bytes. The peak begins anew."""
        found = memory_bytes("VmRSS"), memory_bytes("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_after(self, rank: int, tensors: int) -> None:
        """The rank kills itself once it has gathered so many tensors of the next sync."""
        if self.rank != rank:
            return
        engine = self.actor.engine
        gather = engine.get_per_tensor_param

        def gather_and_die(**options: Any) -> Any:
            weights, rest = gather(**options)

            def some() -> Any:
                for number, pair in enumerate(weights):
                    if number == tensors:
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield pair

            return some(), rest

        engine.get_per_tensor_param = gather_and_die

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_rollout(self, model: str) -> None:
        """A rollout engine in this process, for verl's backend "naive"."""
        self.rollout = HeldModel(model)
        self.layered_summon, self.peft_merge, self.base_sync_done = False, False, True


class HeldModel(BaseRollout):
    """A rollout engine: a model of transformers in bf16, whose weights are replaced in place."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self, model: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.steps: list[int | None] = []
        self.die_at: int | None = None

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, global_steps: int | None = None, **options: Any) -> None:
        own = self.model.state_dict()
        number = 0

        def install(name: str, tensor: torch.Tensor) -> None:
            nonlocal number
            if number == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            number += 1
            own[name].copy_(tensor)

        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                install(name, tensor)
        else:
            for name, tensor in weights:
                install(name, tensor)
        self.steps.append(global_steps)


class Rollout(CheckpointEngineWorker):
    """verl's worker beside a rollout engine."""

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int, model: str) -> None:
        super().__init__(rollout_config, model_config, HeldModel(model))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> tuple[Digests, list[int | None]]:
        """Of the weights in the engine, and the steps of the syncs so far."""
        held = self.server_adapter
        return {name: digest(tensor) for name, tensor in held.model.state_dict().items()}, held.steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_after(self, tensors: int) -> None:
        """The worker kills itself once it has installed so many tensors of the next sync."""
        self.server_adapter.die_at = tensors


class Replica(RolloutReplica):
    """One rollout worker without servers. ``calls``: pauses and ends of pauses, each with its time and the version that
    the machine's peer had staged then.
    """

    def __init__(self, rank: int, config: Any, model_config: Any, worker: Any, peer: str) -> None:
        super().__init__(rank, config, model_config)
        self.workers = [worker]
        self.peer = Path(peer)
        self.calls: list[tuple[str, float, str]] = []

    async def launch_servers(self) -> None:
        pass

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.calls.append(("abort", time.monotonic(), peer_status(self.peer)["staged"]))

    async def resume_generation(self) -> None:
        self.calls.append(("resume", time.monotonic(), peer_status(self.peer)["staged"]))


def configuration(model: str, settings: dict[str, Any]) -> Any:
    """verl's configuration of ``main_ppo`` for a model on CPUs."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.model.use_remove_padding=false",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.actor.strategy=fsdp2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.actor.use_torch_compile=false",
                "actor_rollout_ref.actor.optim.lr=1e-5",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "actor_rollout_ref.rollout.free_cache_engine=false",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=p2pcast",
                "+actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=trainer_node.frameworks.verl",
            ],
        )
    ours = config.actor_rollout_ref
    OmegaConf.set_struct(ours, False)
    ours.rollout.checkpoint_engine.engine_kwargs = {"p2pcast": settings}
    return ours


def actors(config: Any, ranks: int) -> RayWorkerGroup:
    """Actors with their model."""
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([ranks], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Actor), config=config, role="actor"),
        use_gpu=False,
        device_name="cpu",
    )
    group.init_model()
    return group


def replica(config: Any, rank: int, peer: str) -> tuple[RayWorkerGroup, Replica]:
    """A rollout worker on a machine of its own, as far as it knows. ``peer``: folder of that machine's peer."""
    rollout, model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(
            cls=ray.remote(Rollout),
            rollout_config=rollout,
            model_config=model,
            replica_rank=rank,
            model=config.model.path,
        ),
        use_gpu=False,
        device_name="cpu",
        worker_env={"PEER": peer},
    )
    return group, Replica(rank, rollout, model, group.workers[0], peer)
