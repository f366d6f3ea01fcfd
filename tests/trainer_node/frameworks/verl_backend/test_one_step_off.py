"""The unchanged example: verl's one-step-off trainer, FSDP2 actors and a real vLLM, all on CPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from netem.fleet.processes import Processes
from tests.environments import ROOT, python_of
from tests.trainer_node.frameworks.verl_backend.odd_model import write_prompts
from tests.trainer_node.frameworks.verl_backend.two_machines import ENVIRONMENT, Stage

EXAMPLE = ROOT / "examples" / "verl_one_step_off.sh"
STEPS = 20
ON_CPUS = """
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=2 rollout.nnodes=1 rollout.n_gpus_per_node=1
    ++ray_kwargs.ray_init.num_cpus=32 ++ray_kwargs.ray_init.num_gpus=4 ++ray_kwargs.ray_init.include_dashboard=false
    trainer.logger=[console] trainer.val_before_train=false trainer.save_freq=-1 trainer.test_freq=-1
    trainer.resume_mode=disable trainer.total_epochs=10
    data.train_batch_size=4 data.max_prompt_length=16 data.max_response_length=8 data.dataloader_num_workers=0
    reward.num_workers=1
    actor_rollout_ref.model.use_remove_padding=false actor_rollout_ref.model.enable_gradient_checkpointing=false
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.actor.fsdp_config.use_torch_compile=false
    actor_rollout_ref.actor.optim.lr=1e-4
    actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.enforce_eager=true
    actor_rollout_ref.rollout.max_model_len=64 actor_rollout_ref.rollout.max_num_seqs=8
    actor_rollout_ref.rollout.max_num_batched_tokens=64 actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
    +actor_rollout_ref.rollout.enable_sleep_mode=false
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(word.isdigit() and int(word) % 2 for word in solution_str.split()) / 8
"""


def figures(line: str) -> dict[str, float]:
    """The numbers that verl logs for one step."""
    found = re.findall(r"([\w/@.-]+):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)", line)
    return {name: float(value) for name, value in found}


@pytest.mark.prove
@pytest.mark.vllm
def test_the_example_trains_with_a_real_engine(places: tuple[Path, Path, Processes]) -> None:
    # vLLM's attention on CPUs needs heads of 64 dimensions.
    stage = Stage(*places, hidden=128, head=64)
    prompts, reward = stage.folder / "train.parquet", stage.folder / "reward.py"
    write_prompts(prompts, 128)
    reward.write_text(REWARD)
    environment = {
        **ENVIRONMENT,
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,vllm_on_cpus",
        "P2PCAST_SOCK": str(stage.folder / "no.sock"),  # p2pcast's plugin keeps vLLM's weights as loaded on CPUs
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",
        "PYTHON": str(python_of("verl")),
        "HUB": stage.hub,
        "TOKEN_FILE": str(stage.token),
        "PEER": str(stage.peers[0]),
        "MODEL": str(stage.base),
        "TRAIN": str(prompts),
    }
    own = [
        f"trainer.total_training_steps={STEPS}",
        f"reward.custom_reward_function.path={reward}",
        f"hydra.run.dir={stage.folder / 'hydra'}",
        f"++ray_kwargs.ray_init._temp_dir={stage.tmpfs / 'ray'}",
    ]
    run = stage.processes.start("run", [EXAMPLE, *ON_CPUS.split(), *own], environment=environment)
    run.expected = True
    stage.until("the trainer ends", lambda: not run.alive)
    assert run.process.returncode == 0, run.tail(60)
    logged = [figures(line) for line in run.log.read_text().splitlines() if " step:" in line]
    assert [row["training/global_step"] for row in logged] == list(range(1, STEPS + 1))
    assert [row["p2pcast/step"] for row in logged] == list(range(1, STEPS + 1))
    assert all(row["p2pcast/lag_steps"] == 1 for row in logged)
    assert all(row["actor/grad_norm"] > 0 for row in logged)
    names = ("timing_s/step", "p2pcast/before_pause_s", "p2pcast/pause_s")
    print({name: sorted(row[name] for row in logged)[STEPS // 2] for name in names})
