"""A data set with every kind of bad row, prompt, play and reward at once: the run goes on, and each row has a name."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import poisoned_task
import pytest
from ledger_stage import END_S, Up, config_of, worker_loop
from poisoned_task import LONGEST, MARKS, NAME, ROWS
from test_ledger_daemon import client_of, learn

from p2pcast.ledger_api.worker_api import RETURN, ReturnRequest
from p2pcast.rollouts.return_reason import Returned
from p2pcast.tasks.task import Task
from p2pcast.tasks.task_loader import load_task
from p2pcast.tasks.task_process import TaskProcesses
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from tests.support.fake_engine import FakeEngine
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon

STEPS = 6
PROMPT_S = 2.0


class OldClient(LedgerClient):
    """Of a release that gives no reasons."""

    async def give_back(self, session: bytes, leases: Mapping[bytes, Returned]) -> None:
        await self.ask(RETURN, ReturnRequest(session, list(leases)))


async def work(
    daemon: LedgerDaemon, folder: Path, engine: FakeEngine, name: str, task: Task, kind: type[LedgerClient]
) -> Counter[str]:
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{daemon.http.address[1]}"
        client = kind(http, url, (folder / WORKER_FILE).read_text().strip())
        checks = TaskProcesses(NAME, task.hash)
        loop = worker_loop(client, engine, name, JobPlayer(task, checks))
        try:
            await loop.run()
        finally:
            await checks.close()
        return loop.verdicts


def rows_of(told: list[dict[str, Any]]) -> set[int]:
    """Rows that ``prompt`` names, modulo ROWS."""
    return {int(one["prompt"].split()[1]) % ROWS for one in told}


async def test_a_run_of_every_kind_of_bad_row_goes_on(
    tmp_path: Path, up: Up, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MARKS, str(tmp_path))
    engine.versions, engine.max_model_len = ["0.0"], LONGEST
    task = load_task(NAME)
    config = config_of(tmp_path / "ledger", last_step=STEPS, prompt_s=PROMPT_S)
    policy = dataclasses.replace(config.policy, task_hash=task.hash)
    config = dataclasses.replace(config, policy=policy, task=task, task_name=NAME)
    async with asyncio.timeout(END_S), up(config) as daemon:
        learner = asyncio.create_task(asyncio.to_thread(learn, client_of(daemon, config.state), engine, STEPS))
        kinds = {"a": LedgerClient, "b": LedgerClient, "old": OldClient}
        done = await asyncio.gather(
            *(work(daemon, config.state, engine, name, task, kind) for name, kind in kinds.items())
        )
        batches = await learner
        await daemon.view.renew()
        status = daemon.view.status()
        told: dict[str, list[dict[str, Any]]] = {}
        await daemon._ledger_events.emit()
        for event in daemon._events.after(0, 10_000)[1]:
            told.setdefault(event.kind, []).append(dict(event.facts))
    assert len(batches) == STEPS
    played = {group.group.prompt[0] - 3 for batch in batches for group in batch.groups}
    assert played == {poisoned_task.GOOD}
    assert {row["blamed"] for row in status["workers"]} == {0}
    # The rows that are no prompts, and those that no worker can play or no check can score.
    assert rows_of(told["prompt_rejected"]) == {
        poisoned_task.NO_TOKENS,
        poisoned_task.NO_PROMPT,
        poisoned_task.NO_BYTES,
    }
    named = {poisoned_task.RAISES, poisoned_task.LONG, poisoned_task.NO_REWARD, poisoned_task.NO_RESULT}
    assert rows_of(told["job_rejected"]) <= named
    reasons = {row: {one["reason"] for one in told["job_rejected"] if rows_of([one]) == {row}} for row in named}
    assert reasons == {
        poisoned_task.RAISES: {"failed play"},
        poisoned_task.LONG: {"refused prompt"},
        poisoned_task.NO_RESULT: {"failed play"},
        poisoned_task.NO_REWARD: {"not scored"},
    }
    assert all("(row " in one["prompt"] for one in told["job_rejected"])
    assert status["returned_leases"]["not stated"] >= 1
    assert "prompt 10: OSError: the data set is away (" in caplog.text
    late = re.search(rf"prompt (\d+) of jobs\(7\) of task {NAME} has not come for {PROMPT_S:g} s", caplog.text)
    assert late is not None
    # The first of the prompts that were asked for together, which is this one or one before.
    assert poisoned_task.FAILS_AT < int(late[1]) <= poisoned_task.HANGS_AT
    assert sum(verdicts["accepted"] for verdicts in done) > 0
