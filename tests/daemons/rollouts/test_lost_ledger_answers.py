"""Requests of workers and learners that took effect at a ledger, and whose first answers are lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from ledger_stage import END_S, Up, config_of, worker_loop
from lost_answers import withholding
from test_ledger_daemon import learn

from p2pcast.ledger_api.batch_client import BatchClient
from rollout_node.worker.ledger_client import LedgerClient
from tests.support.fake_engine import FakeEngine
from trainer_node.ledger_server.callers import WORKER_FILE

STEPS = 3


@pytest.mark.parametrize(
    "path",
    [
        "/v1/workers",
        "/v1/lease",
        "/v1/results",
        "/v1/learner/resume",
        "/v1/versions",
        "/v1/batches/take",
        "/v1/batches/applied",
        "/v1/batches/ack",
    ],
)
async def test_an_answer_of_the_ledger_that_is_lost_counts_nothing_twice(
    tmp_path: Path, up: Up, engine: FakeEngine, path: str
) -> None:
    engine.versions, asked = ["0.0"], False

    def look(chunk: bytes) -> None:
        nonlocal asked
        asked |= path.encode() + b" " in chunk or path.encode() + b"?" in chunk

    config = config_of(tmp_path, last_step=STEPS)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        async with withholding(daemon.http.address, lambda: asked, once=True, asked=look) as proxy:
            url = f"http://127.0.0.1:{proxy.address[1]}"
            ledger = LedgerClient(http, url, (tmp_path / WORKER_FILE).read_text().strip())
            loop = worker_loop(ledger, engine, "a")
            client = BatchClient(url, bearer_file=tmp_path / "http.token", give_up_s=END_S)
            _, batches = await asyncio.gather(loop.run(), asyncio.to_thread(learn, client, engine, STEPS))
        assert proxy.withheld.is_set()
        await daemon.view.renew()
        status = daemon.view.status()
    assert [batch.step for batch in batches] == list(range(STEPS))
    jobs = [rollout.result.job for batch in batches for group in batch.groups for rollout in group.rollouts]
    assert len(set(jobs)) == len(jobs)
    assert [(row["name"], row["blamed"]) for row in status["workers"]] == [("a", 0)]
