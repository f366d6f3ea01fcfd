"""An auditor finds the worker whose engine does not compute with the weights that it names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from ledger_stage import END_S, Up, config_of
from test_ledger_daemon import client_of, work

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.ledger_connection import LedgerConnection
from p2pcast.ledger_api.trainer_api import TAKE_AUDIT, TakeAuditRequest
from p2pcast.rollouts.result import Result
from rollout_node.worker.auditor import Auditor
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from tests.support.fake_engine import FakeEngine, digest_of
from tests.support.until import until
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon

SCHEDULE = b"s" * 32
"""Name of a schedule of sparse attention."""


def audits_of(daemon: LedgerDaemon, file: Path) -> LedgerConnection:
    url = f"http://127.0.0.1:{daemon.http.address[1]}"
    return LedgerConnection(url, bearer_file=file, give_up_s=0.0)


async def taken(ledger: LedgerConnection, version: Version) -> bytes | None:
    return (await asyncio.to_thread(ledger.ask, TAKE_AUDIT, TakeAuditRequest(str(version)))).result


async def _audit(daemon: LedgerDaemon, folder: Path, engine: FakeEngine, count: int) -> Auditor:
    async with aiohttp.ClientSession() as http:
        versions = EngineVersions(http, engine.url, engine.url)
        scorer = GenerateSampler(http, engine.url, versions)
        ledger = audits_of(daemon, folder / "http.token")
        auditor = Auditor(ledger, scorer, versions, tolerance=0.05, interval_s=0.0)
        await auditor.run(count)
        return auditor


async def test_results_of_other_weights_disagree(tmp_path: Path, up: Up, engine: FakeEngine) -> None:
    liar = FakeEngine(true_weights="0.9")
    engine.versions = liar.versions = ["0.0"]
    await liar.start()
    async with asyncio.timeout(END_S), up(config_of(tmp_path, batch_groups=8)) as daemon:
        learner = client_of(daemon, tmp_path)
        await asyncio.to_thread(learner.resume, 0, 0)
        await asyncio.to_thread(learner.publish, Version(0, 0), bytes.fromhex(digest_of("0.0")))
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(work(daemon, tmp_path, each, name))
                for each, name in ((engine, "honest"), (liar, "liar"))
            ]
            # 24 groups of 4 may open: each worker has results before the other could play them all.
            auditor = await _audit(daemon, tmp_path, engine, 40)
            for task in workers:
                task.cancel()
        await daemon.view.renew()
        rows = {row["name"]: row for row in daemon.view.workers()["workers"]}
    await liar.stop()
    assert rows["honest"]["disagreements"] == 0 < rows["honest"]["audits"]
    assert rows["liar"]["disagreements"] == rows["liar"]["audits"] > 0
    assert auditor.found["disagrees"] == rows["liar"]["audits"]
    assert auditor.found["agrees"] == rows["honest"]["audits"]


async def test_a_claimed_schedule_hides_no_result_from_audits(tmp_path: Path, up: Up, engine: FakeEngine) -> None:
    """Only results of the version that carries the schedule may claim it, and go without an audit."""
    engine.versions, engine.tokens_a_version = ["0.0", "0.1"], 60
    engine.schedules = {"0.0": SCHEDULE.hex(), "0.1": SCHEDULE.hex()}
    async with asyncio.timeout(END_S), up(config_of(tmp_path, batch_groups=8)) as daemon:
        learner = client_of(daemon, tmp_path)
        await asyncio.to_thread(learner.resume, 0, 0)
        await asyncio.to_thread(learner.publish, Version(0, 0), bytes.fromhex(digest_of("0.0")), SCHEDULE)
        await asyncio.to_thread(learner.publish, Version(0, 1), bytes.fromhex(digest_of("0.1")))
        claiming = asyncio.create_task(work(daemon, tmp_path, engine, "claims"))

        async def blamed() -> list[bool]:
            await daemon.view.renew()
            return [row["blamed"] for row in daemon.view.workers()["workers"]]

        await until(blamed, holds=any)
        claiming.cancel()
        ledger, bodies = audits_of(daemon, tmp_path / "http.token"), []
        for version in (Version(0, 0), Version(0, 1)):
            while (body := await taken(ledger, version)) is not None:
                bodies.append(Result.from_bytes(body))
    assert {version for result in bodies for version in result.sparse_versions} == {Version(0, 0)}


async def test_a_worker_reads_no_results_by_auditing(tmp_path: Path, up: Up) -> None:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon:
        thief = audits_of(daemon, tmp_path / WORKER_FILE)
        with pytest.raises(RefusedError, match="needs the role trainer"):
            await taken(thief, Version(0, 0))
