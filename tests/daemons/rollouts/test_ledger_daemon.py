"""A ledger's daemon with real workers, a trainer, and an engine of 16 tokens: whole runs over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import aiohttp
from costly_task import NAME, Costly, Lying
from ledger_stage import END_S, Up, config_of, worker_loop
from parity_task import Parity
from poisoned_task import AWAY

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient, RolloutBatch
from p2pcast.rollouts.overlong import Overlong
from p2pcast.tasks.task import Task
from p2pcast.tasks.task_loader import load_task
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from tests.support.fake_engine import FakeEngine, digest_of
from trainer_node.ledger.ledger_rows import Trust
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon


async def work(
    daemon: LedgerDaemon, folder: Path, engine: FakeEngine, name: str, slots: int = 4, task: Task | None = None
) -> Counter[str]:
    """A worker's loop until the end of the run; its verdicts."""
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{daemon.http.address[1]}"
        client = LedgerClient(http, url, (folder / WORKER_FILE).read_text().strip())
        loop = worker_loop(client, engine, name, None if task is None else JobPlayer(task), slots)
        await loop.run()
        return loop.verdicts


def client_of(daemon: LedgerDaemon, folder: Path, overlong: Overlong = "keep") -> BatchClient:
    url = f"http://127.0.0.1:{daemon.http.address[1]}"
    return BatchClient(url, bearer_file=folder / "http.token", give_up_s=END_S, overlong=overlong)


def learn(client: BatchClient, engine: FakeEngine, steps: int) -> list[RolloutBatch]:
    """A learner that publishes after every step, at once, to the engine."""
    client.resume(0, 0)
    client.publish(Version(0, 0), bytes.fromhex(digest_of("0.0")))
    batches = []
    while (batch := client.take(len(batches))) is not None:
        batches.append(batch)
        step = len(batches)
        client.applied(batch, step)
        client.publish(Version(0, step), bytes.fromhex(digest_of(f"0.{step}")))
        engine.versions = [*engine.versions, f"0.{step}"]
        engine.tokens_a_version = 1  # the newest version from now on
        client.ack(step, [batch.id], bytes(32))
    assert len(batches) == steps
    return batches


async def test_a_run_ends_and_every_batch_is_fresh(tmp_path: Path, up: Up, engine: FakeEngine) -> None:
    engine.versions = ["0.0"]
    async with asyncio.timeout(END_S), up(config_of(tmp_path, last_step=5)) as daemon:
        client = client_of(daemon, tmp_path)
        learner = asyncio.create_task(asyncio.to_thread(learn, client, engine, 5))
        done = await asyncio.gather(*(work(daemon, tmp_path, engine, name) for name in "ab"))
        batches = await learner
    seen: set[bytes] = set()
    task = Parity()
    for batch in batches:
        assert 1 <= len(batch.groups) <= 2
        for group in batch.groups:
            assert len({r.reward for r in group.rollouts}) > 1
            for rollout in group.rollouts:
                result = rollout.result
                assert result.oldest_step >= batch.step - 2
                assert all(span.manifest == bytes.fromhex(digest_of(str(span.version))) for span in result.spans)
                assert result.job not in seen
                seen.add(result.job)
    assert sum(verdicts["accepted"] for verdicts in done) >= len(seen)
    assert task.hash == batches[0].groups[0].group.task_hash


async def test_hooks_that_fail_make_the_ledger_unready(tmp_path: Path, up: Up) -> None:
    async with (
        asyncio.timeout(END_S),
        up(config_of(tmp_path, hooks="tests.daemons.rollouts.wrong_hooks:Wrong")) as daemon,
    ):
        url = f"http://127.0.0.1:{daemon.http.address[1]}/readyz"
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.get(url) as answer:
                    status, text = answer.status, await answer.text()
                if "tests.daemons.rollouts.wrong_hooks:Wrong" in text:
                    break
                await asyncio.sleep(0.05)
    assert status == 503
    assert "ValueError: a wrong turn (wrong_hooks.py, line 11); no further prompts are added" in text


async def test_jobs_that_raise_make_the_ledger_unready_and_end_nothing(tmp_path: Path, up: Up) -> None:
    task = load_task(AWAY)
    config = config_of(tmp_path)
    policy = dataclasses.replace(config.policy, task_hash=task.hash)
    config = dataclasses.replace(config, task=task, task_name=AWAY, policy=policy)
    async with asyncio.timeout(END_S), up(config) as daemon:
        url = f"http://127.0.0.1:{daemon.http.address[1]}"
        async with aiohttp.ClientSession() as http:
            text = ""
            while "prompts: " not in text:
                async with http.get(f"{url}/readyz") as answer:
                    status, text = answer.status, await answer.text()
                await asyncio.sleep(0.05)
            async with http.get(f"{url}/healthz") as answer:
                assert answer.status == 200
        # The prompts before the error are there all the same.
        assert (await asyncio.to_thread(daemon._ledger.prompts, 7)).cursor == 3
    assert status == 503
    assert f"jobs(7) of task {AWAY}: prompt 3: OSError: the data set is away" in text
    assert "poisoned_task.py, line " in text


async def test_false_rewards_of_a_worker_are_not_trained(tmp_path: Path, up: Up, engine: FakeEngine) -> None:
    engine.versions = ["0.0"]
    config, task = config_of(tmp_path, last_step=4), Costly()
    policy = dataclasses.replace(config.policy, task_hash=task.hash, trust=Trust(0.25, replays=True))
    config = dataclasses.replace(config, policy=policy, task=task, task_name=NAME)
    async with asyncio.timeout(END_S), up(config) as daemon:
        learner = asyncio.create_task(asyncio.to_thread(learn, client_of(daemon, tmp_path), engine, 4))
        honest = work(daemon, tmp_path, engine, "honest", task=task)
        # The liar may end early: at the sixteenth false reward it gets no more leases.
        liar = work(daemon, tmp_path, engine, "liar", task=Lying())
        await asyncio.gather(honest, liar, return_exceptions=True)
        batches = await learner
        await daemon.view.renew()
        workers = {row["name"]: row for row in daemon.view.workers()["workers"]}
    assert workers["liar"]["false_rewards"] > 0
    assert (workers["honest"]["false_rewards"], workers["honest"]["failed_replays"]) == (0, 0)
    for rollout in (one for batch in batches for group in batch.groups for one in group.rollouts):
        said = rollout.result.token_ids[rollout.result.mask == 1]
        assert rollout.reward == float(int(said.sum()) % 2)
