"""A real ledger and a real worker, with a task whose plays block or end their process for some prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

from ledger_stage import END_S, Up, config_of
from test_ledger_daemon import client_of, learn

from tests.daemons.rollouts.blocking_task import NAME, Blocking
from tests.support.fake_engine import FakeEngine
from trainer_node.ledger_server.callers import WORKER_FILE


async def test_a_run_goes_on_although_plays_block_or_end_their_process(
    tmp_path: Path, up: Up, engine: FakeEngine
) -> None:
    engine.versions, task, steps = ["0.0"], Blocking(), 2
    config = config_of(tmp_path, last_step=steps)
    policy = dataclasses.replace(config.policy, task_hash=task.hash)
    config = dataclasses.replace(config, policy=policy, task=task, task_name=NAME)
    async with asyncio.timeout(END_S), up(config) as daemon:
        learner = asyncio.create_task(asyncio.to_thread(learn, client_of(daemon, tmp_path), engine, steps))
        url, peer = f"127.0.0.1:{daemon.http.address[1]}", engine.url.removeprefix("http://")
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "p2pcast.cli", "work", url, "--bearer-file", str(tmp_path / WORKER_FILE)),
            *("--engine", engine.url, "--peer", peer, "--task", NAME, "--play-step", "1", "--slots", "16"),
            cwd=Path(__file__).parents[3],
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await worker.communicate()
        assert worker.returncode == 0, said.decode()
        batches = await learner
        await daemon.view.renew()
        rejected = daemon.view.status()["rejected_jobs"]
    assert rejected.keys() <= {"hung play", "failed play"}
    assert rejected["failed play"] > 0
    prompts = [group.group.prompt[0] for batch in batches for group in batch.groups]
    assert not any(first == 3 or first % 4 == 0 for first in prompts)
