"""Probes over HTTP: a real ledger, workers with engines of 16 tokens, and the learner's watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from ledger_stage import END_S, Up, config_of
from parity_task import Parity
from test_ledger_daemon import client_of

from p2pcast.cli.ledger_table import ledger_heading
from p2pcast.cli.status_document import StatusObject
from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.ledger_connection import LedgerConnection
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, ProbeSet
from rollout_node.worker import probe_loop
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.play_loop import PlayLoop, WorkerConfig
from rollout_node.worker.probe_loop import ProbeLoop
from tests.support.fake_engine import FakeEngine, digest_of, logprobs
from tests.support.until import until
from trainer_node.learning.monitoring.run_log import LOG_NAME, RunLog
from trainer_node.learning.probing.engine_probes import UNPROBED, EngineProbes, ProbeClient
from trainer_node.learning.probing.probe_prompts import probe_set_of
from trainer_node.learning.probing.probe_rule import FLOOR_VERSIONS
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon
from trainer_node.ledger_server.probes.probe_desk import MISSED

STEPS = FLOOR_VERSIONS + 2


def found_set() -> ProbeSet:
    task = Parity()
    found = probe_set_of(task, task.jobs(3), 8, task.vocabulary)
    assert found is not None
    return found


def learner_scores(probe_set: ProbeSet, version: Version) -> np.ndarray:
    """As the engine's model scores the set with the version's weights, but for rounding."""
    scores = [
        logprobs(sequence[:at], str(version), 1.0)[sequence[at]]
        for sequence in probe_set.sequences
        for at in range(1, len(sequence))
    ]
    rounding = np.random.default_rng(version.step).normal(0.0, 1e-3, len(scores))
    return (np.array(scores) + rounding).astype("<f4")


@asynccontextmanager
async def working(daemon: LedgerDaemon, folder: Path, engine: FakeEngine, name: str) -> AsyncIterator[None]:
    """A worker with probes, for the length of the block."""
    async with aiohttp.ClientSession() as http:
        versions = EngineVersions(http, engine.url, engine.url)
        sampler = GenerateSampler(http, engine.url, versions)
        url = f"http://127.0.0.1:{daemon.http.address[1]}"
        client = LedgerClient(http, url, (folder / WORKER_FILE).read_text().strip())
        probes = ProbeLoop(client, sampler, versions, Parity().vocabulary)
        loop = PlayLoop(WorkerConfig(name=name, slots=1), JobPlayer(Parity()), client, sampler, versions, probes)
        running = asyncio.create_task(loop.run())
        try:
            yield
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.wait([running])


def probes_of(daemon: LedgerDaemon, file: Path) -> ProbeClient:
    url = f"http://127.0.0.1:{daemon.http.address[1]}"
    return ProbeClient(LedgerConnection(url, bearer_file=file, give_up_s=0.0))


async def read(daemon: LedgerDaemon, path: str, bearer: str) -> str:
    url = f"http://127.0.0.1:{daemon.http.address[1]}{path}"
    async with aiohttp.ClientSession() as http, http.get(url, headers={"Authorization": f"Bearer {bearer}"}) as answer:
        assert answer.status == 200
        return await answer.text()


async def test_engine_with_other_weights_is_alarmed_everywhere_a_person_looks(
    tmp_path: Path, up: Up, engine: FakeEngine, monkeypatch
) -> None:
    for name in ("CHECK_S", "ASK_S"):
        monkeypatch.setattr(probe_loop, name, 0.01)
    wrong = FakeEngine()
    await wrong.start()
    probe_set = await asyncio.to_thread(found_set)
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon:
        learner = client_of(daemon, tmp_path)
        await asyncio.to_thread(learner.resume, 0, 0)
        with RunLog(tmp_path / LOG_NAME) as log:
            probes = EngineProbes(probes_of(daemon, tmp_path / "http.token"), probe_set, log.write)
            engine.versions = wrong.versions = ["0.0"]
            async with working(daemon, tmp_path, engine, "right"), working(daemon, tmp_path, wrong, "wrong"):
                for step in range(STEPS):
                    version = Version(0, step)
                    await asyncio.to_thread(learner.publish, version, bytes.fromhex(digest_of(str(version))))
                    probes.published(step, 0, learner_scores(probe_set, version))
                    engine.versions = wrong.versions = [str(version)]
                    # The last version's weights never reach this engine, whatever it says.
                    wrong.true_weights = f"0.{step - 1}" if step == STEPS - 1 else None
                    while len(log.record.probes) < 2 * (step + 1):
                        await asyncio.to_thread(probes.look)
                        await asyncio.sleep(0.005)
            record = log.record
        bearer = (tmp_path / "http.token").read_text().strip()
        status: dict[str, Any] = json.loads(await read(daemon, "/status", bearer))["probes"]
        metrics = await read(daemon, "/metrics", bearer)
        _, events = daemon._events.after(0)
        assert daemon.view.summary()["probe_alarm"] == 1
    await wrong.stop()
    assert [(str(probe.version), probe.engine.rsplit(" ", 1)[1]) for probe in record.probes if probe.alarm] == [
        (f"0.{STEPS - 1}", "wrong")
    ]
    assert len(record.probes) == 2 * STEPS
    assert all(probe.kl is not None and probe.kl < 1e-5 for probe in record.probes if not probe.alarm)
    assert status["alarm"] == status["alarms"] == 1
    assert status["tokens"] == probe_set.tokens
    rows = {row["worker"]: row for row in status["engines"]}
    assert rows["right"]["alarm"] is False
    assert rows["wrong"]["alarm"] is True
    assert rows["wrong"]["kl"] > 10 * rows["wrong"]["floor"]
    assert "p2pcast_ledger_probe_alarm 1.0" in metrics
    assert 'p2pcast_ledger_probe_kl{worker="wrong"}' in metrics
    (alarm,) = [event for event in events if event.kind == "probe_alarm"]
    assert {key: alarm.facts[key] for key in ("worker", "version")} == {"worker": "wrong", "version": f"0.{STEPS - 1}"}


async def test_engine_with_short_texts_is_probed(tmp_path: Path, up: Up, engine: FakeEngine, monkeypatch) -> None:
    """Of a server with --max-model-len 64, as in the guide of the first run."""
    for name in ("CHECK_S", "ASK_S"):
        monkeypatch.setattr(probe_loop, name, 0.01)
    probe_set = await asyncio.to_thread(found_set)
    engine.max_model_len, engine.versions = 64, ["0.0"]
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon:
        learner = client_of(daemon, tmp_path)
        await asyncio.to_thread(learner.resume, 0, 0)
        await asyncio.to_thread(learner.publish, Version(0, 0), bytes.fromhex(digest_of("0.0")))
        probes = probes_of(daemon, tmp_path / "http.token")
        await asyncio.to_thread(probes.put, probe_set)
        async with working(daemon, tmp_path, engine, "w"):
            await until(lambda: asyncio.to_thread(probes.read, probe_set))
        assert daemon.view.summary()["probe_missing"] == 0


async def test_engine_that_refuses_all_probes_is_named_everywhere(
    tmp_path: Path, up: Up, engine: FakeEngine, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("CHECK_S", "ASK_S"):
        monkeypatch.setattr(probe_loop, name, 0.01)
    probe_set = await asyncio.to_thread(found_set)
    engine.max_model_len, engine.versions = 32, ["0.0"]
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon:
        learner = client_of(daemon, tmp_path)
        await asyncio.to_thread(learner.resume, 0, 0)
        with RunLog(tmp_path / LOG_NAME) as log:
            probes = EngineProbes(probes_of(daemon, tmp_path / "http.token"), probe_set, log.write)
            async with working(daemon, tmp_path, engine, "w"):
                for step in range(MISSED + 1):
                    version = Version(0, step)
                    await asyncio.to_thread(learner.publish, version, bytes.fromhex(digest_of(str(version))))
                    probes.published(step, 0, learner_scores(probe_set, version))
                    await asyncio.to_thread(probes.look)
                    engine.versions = [str(version)]
                    asked = daemon.view._probes._workers
                    await until(lambda: any(one.version == version for one in asked.values()))  # noqa: B023 - at once
                assert daemon.view.summary()["probe_missing"] == 1
                bearer = (tmp_path / "http.token").read_text().strip()
                status = json.loads(await read(daemon, "/status", bearer))
                assert status["probes"]["missing"] == ["w"]
                assert "probes of w fail" in str(ledger_heading(StatusObject(status)))
                assert "p2pcast_ledger_probe_missing 1.0" in await read(daemon, "/metrics", bearer)
                engine.max_model_len = None
                version = Version(0, MISSED + 1)
                await asyncio.to_thread(learner.publish, version, bytes.fromhex(digest_of(str(version))))
                probes.published(version.step, 0, learner_scores(probe_set, version))
                engine.versions = [str(version)]
                while not log.record.probes:
                    await asyncio.to_thread(probes.look)
                    await asyncio.sleep(0.005)
                assert daemon.view.summary()["probe_missing"] == 0
        _, events = daemon._events.after(0)
    told = [(event.kind, event.facts["worker"]) for event in events if event.kind.startswith("probe_missing")]
    assert told == [("probe_missing", "w"), ("probe_missing_over", "w")]
    assert f"no engine was probed at the newest {UNPROBED} versions" in caplog.text


async def test_worker_neither_sets_nor_reads_nor_judges_probes(tmp_path: Path, up: Up) -> None:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon:
        thief, probe_set = probes_of(daemon, tmp_path / WORKER_FILE), await asyncio.to_thread(found_set)
        for call in (lambda: thief.put(probe_set), lambda: thief.read(probe_set), lambda: thief.judge([])):
            with pytest.raises(RefusedError, match="needs the role trainer"):
                await asyncio.to_thread(call)


async def test_malformed_scores_and_unknown_versions_are_refused(tmp_path: Path, up: Up) -> None:
    probe_set = await asyncio.to_thread(found_set)
    good = np.full(probe_set.scores, -1.0, "<f4").tobytes().hex()
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon:
        learner, probes = client_of(daemon, tmp_path), probes_of(daemon, tmp_path / "http.token")
        await asyncio.to_thread(learner.publish, Version(0, 0), bytes.fromhex(digest_of("0.0")))
        await asyncio.to_thread(probes.put, probe_set)
        headers = {"Authorization": f"Bearer {(tmp_path / WORKER_FILE).read_text().strip()}"}
        base = f"http://127.0.0.1:{daemon.http.address[1]}/v1"
        async with aiohttp.ClientSession(headers=headers) as http:

            async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
                async with http.post(f"{base}/{path}", json=body) as answer:
                    return answer.status, await answer.json() if answer.content_type == "application/json" else None

            task = Parity()
            about = {"name": "w", "slots": 1, "task": task.name, "task_hash": task.hash.hex()}
            _, made = await post("workers", about)
            served = {"session": made["session"], "served": "0.0", "manifest": digest_of("0.0")}
            report = served | {"set": probe_set.id.hex(), "engine": "vllm:e", "scores": good}
            assert await post("probes/report", report) == (200, {"wanted": False}), "it was not asked for"
            assert (await post("probes/take", served | {"manifest": digest_of("0.9")}))[0] == 200
            assert (await post("probes/take", served))[0] == 200
            nan = np.full(probe_set.scores, np.nan, "<f4").tobytes().hex()
            above = np.full(probe_set.scores, 0.5, "<f4").tobytes().hex()
            for change, status in (
                ({"scores": nan}, 400),
                ({"scores": above}, 400),
                ({"scores": good[:-8]}, 400),
                ({"scores": good + 8 * "0"}, 400),
                ({"scores": good[:-1] + "g"}, 400),
                ({"scores": "0" * (8 * MAX_PROBE_TOKENS + 8)}, 400),
                ({"scores": None}, 400),
                ({"engine": "e" * 5000}, 400),
                ({"set": "00"}, 400),
                ({"manifest": digest_of("0.9")}, 409),
                ({"served": "0.9"}, 409),
                ({"session": "00" * 16}, 404),
            ):
                found, answer = await post("probes/report", report | change)
                assert (found, change) == (status, change), answer
            assert await post("probes/report", report | {"set": "11" * 16}) == (200, {"wanted": False})
            assert await post("probes/report", report) == (200, {"wanted": True})
            assert await post("probes/report", report) == (200, {"wanted": False})
        answers = await asyncio.to_thread(probes.read, probe_set)
        assert answers is not None
        assert [(one.worker, one.engine, one.version) for one in answers] == [("w", "vllm:e", Version(0, 0))]
