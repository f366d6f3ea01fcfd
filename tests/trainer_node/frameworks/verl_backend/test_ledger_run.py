"""verl's one-step-off trainer on a ledger: real hub, peer, ledger and worker. The worker samples from the engine of 16
tokens that follows the hub. verl's own vLLM is real, and generates nothing.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from netem.fleet.processes import Processes, free_port
from tests.environments import python_of
from tests.trainer_node.frameworks.bridge_stage import batch_states
from tests.trainer_node.frameworks.verl_backend.odd_model import write_prompts
from tests.trainer_node.frameworks.verl_backend.test_one_step_off import EXAMPLE, ON_CPUS, figures
from tests.trainer_node.frameworks.verl_backend.two_machines import ENVIRONMENT, Stage

from learner_run import FollowingEngine  # isort: skip  # bridge_stage has made it importable
from parity_task import NAME  # isort: skip

STEPS, GROUPS, SIZE, SAVE_EVERY = 8, 4, 4, 3


def daemon_url(stage: Stage, name: str) -> str:
    file = stage.folder / name / "daemon.json"
    stage.until(f"{name} has an address", file.exists)
    return str(json.loads(file.read_text())["http"])


async def follow(engine: FollowingEngine, hub: str, done: asyncio.Event) -> None:
    await engine.start()
    following = asyncio.create_task(engine.follow(hub))
    await done.wait()
    following.cancel()
    await engine.stop()


@pytest.mark.prove
@pytest.mark.vllm
async def test_verl_trains_each_batch_of_a_ledger_once(places: tuple[Path, Path, Processes]) -> None:
    stage = await asyncio.to_thread(Stage, *places, hidden=128, head=64)
    hub = await asyncio.to_thread(daemon_url, stage, "hub")
    engine, done = FollowingEngine(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(engine, hub, done), name="engine")
        try:
            log = await asyncio.to_thread(run, stage, hub, engine)
        finally:
            done.set()
    logged = [figures(line) for line in log.splitlines() if " step:" in line]
    assert [row["training/global_step"] for row in logged] == list(range(1, STEPS + 1))
    assert all(row["actor/grad_norm"] > 0 for row in logged)
    # Rewards are 0 and 1, and no group has equal ones.
    assert all(0 < row["critic/score/mean"] < 1 for row in logged)
    states = batch_states(stage.folder / "ledger")
    assert [step for step, _ in states] == list(range(STEPS))
    # verl's checkpoints have 3, 6 and 8 steps; no batch is asked for after the last.
    assert {state for _, state in states[:SAVE_EVERY]} == {"trained"}
    assert {state for _, state in states} <= {"trained", "applied", "cut"}


def run(stage: Stage, hub: str, engine: FollowingEngine) -> str:
    """The output of verl."""
    python, http = sys.executable, f"127.0.0.1:{free_port()}"
    words = [
        "ledger",
        "--task",
        NAME,
        "--hub-http",
        hub.removeprefix("http://"),
        "--staleness",
        3,
        "--batch-groups",
        GROUPS,
    ]
    words += ["--group-size", SIZE, "--last-step", STEPS, "--state", stage.folder / "ledger", "--http", http]
    stage.processes.start("ledger", [python, "-m", "p2pcast.cli", *map(str, words)])
    bearer = stage.folder / "ledger" / "http.token"
    stage.until("the ledger answers", (stage.folder / "ledger" / "daemon.json").exists)
    stage.until("the engine listens", lambda: engine.url)
    words = ["work", http, "--task", NAME, "--slots", 8, "--engine", engine.url]
    words += ["--peer", engine.url.removeprefix("http://"), "--bearer-file", stage.folder / "ledger" / "worker.token"]
    stage.processes.start("worker", [python, "-m", "p2pcast.cli", *map(str, words)]).expected = True
    prompts = stage.folder / "train.parquet"
    write_prompts(prompts, 64)
    environment = {
        **ENVIRONMENT,
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,vllm_on_cpus",
        "P2PCAST_SOCK": str(stage.folder / "no.sock"),
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
    changed = re.sub(r"trainer\.save_freq=-1|actor_rollout_ref\.rollout\.n=2", "", ON_CPUS).split()
    own = [
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={SAVE_EVERY}",
        f"trainer.default_local_dir={stage.folder / 'checkpoints'}",
        f"actor_rollout_ref.rollout.n={SIZE}",
        "algorithm.adv_estimator=p2pcast",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=trainer_node.frameworks.verl.LedgerAgentLoopManager",
        f"+p2pcast_ledger.url=http://{http}",
        f"+p2pcast_ledger.bearer_file={bearer}",
        f"+p2pcast_ledger.hub_http={hub}",
        f"hydra.run.dir={stage.folder / 'hydra'}",
        f"++ray_kwargs.ray_init._temp_dir={stage.tmpfs / 'ray'}",
    ]
    trainer = stage.processes.start("run", [EXAMPLE, *changed, *own], environment=environment)
    trainer.expected = True
    stage.until("the trainer ends", lambda: not trainer.alive)
    assert trainer.process.returncode == 0, trainer.tail(60)
    stage.processes.stop("ledger")
    return trainer.log.read_text()
