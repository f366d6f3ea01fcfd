"""A real Prometheus scrapes a hub, peers and a ledger at work.

- Each query of the dashboard has series, for all daemons and for chosen ones.
- No alert is pending or fires on the healthy run. The alert on refused installs fires once an engine refuses one, and
  the alert on rejected jobs once a job was. The alert on an idle ledger is pending once no worker is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from costly_task import NAME, Costly
from ledger_stage import config_of, running
from test_ledger_daemon import client_of
from test_ledger_requests import Stage, played
from test_probes import found_set, learner_scores, probes_of

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient, RolloutBatch
from rollout_node.worker import probe_loop
from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.play_loop import PlayLoop, WorkerConfig
from rollout_node.worker.probe_loop import ProbeLoop
from tests.daemons.conftest import Swarm
from tests.deploy.deploy_files import alert_rules, chosen, filled, targets, variables
from tests.deploy.prometheus_server import SCRAPE_S, Prometheus
from tests.support.fake_engine import FakeEngine, digest_of
from trainer_node.learning.monitoring.run_log import LOG_NAME, RunLog
from trainer_node.learning.probing.engine_probes import EngineProbes
from trainer_node.ledger.ledger_rows import Trust
from trainer_node.ledger_server import ledger_view
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerConfig, LedgerDaemon

INTERVAL_S = 30 + SCRAPE_S
"""``$__rate_interval`` of a panel whose points are 30 s apart: Grafana adds the interval of scrapes."""
ENOUGH = 3
"""Scrapes after which a rate has a value."""
TRIES = 3
"""Looks at the dashboard: a scrape that a busy machine delays leaves a gap in all series of its target."""
STEPS = 2
VERSIONS = range(2, 6)
BROKEN = "exec:false"


def ledger_config(folder: Path) -> LedgerConfig:
    """Workers' rewards count, and some are replayed."""
    folder.mkdir()
    config, task = config_of(folder), Costly()
    policy = dataclasses.replace(config.policy, task_hash=task.hash, trust=Trust(0.25, replays=True))
    return dataclasses.replace(config, policy=policy, task=task, task_name=NAME)


@contextlib.asynccontextmanager
async def working(daemon: LedgerDaemon, folder: Path, engine: FakeEngine) -> AsyncIterator[None]:
    """A worker with probes, for the length of the block."""
    async with aiohttp.ClientSession() as http:
        versions = EngineVersions(http, engine.url, engine.url)
        sampler = GenerateSampler(http, engine.url, versions)
        url = f"http://127.0.0.1:{daemon.http.address[1]}"
        client = LedgerClient(http, url, (folder / WORKER_FILE).read_text().strip())
        probes = ProbeLoop(client, sampler, versions, Costly().vocabulary)
        loop = PlayLoop(WorkerConfig(name="w", slots=4), JobPlayer(Costly()), client, sampler, versions, probes=probes)
        task = asyncio.create_task(loop.run())
        try:
            yield
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.wait([task])


async def begun(client: BatchClient) -> None:
    """A learner resumes, and its first version is known."""
    await asyncio.to_thread(client.resume, 0, 0)
    await asyncio.to_thread(client.publish, Version(0, 0), bytes.fromhex(digest_of("0.0")))


async def rejected_result(daemon: LedgerDaemon, folder: Path) -> None:
    """A second worker names a version that the ledger does not know."""
    async with aiohttp.ClientSession() as http:
        stage = Stage(daemon, folder, http)
        session = await stage.register("twice", Costly().hash)
        [(lease, job)] = await stage.lease(session, manifest=digest_of("0.0"))
        _, answer = await stage.hand_in(session, await played(lease, job, version=Version(0, 9)))
    assert answer["results"][0]["reason"] == "unknown version"


async def rejected_job(daemon: LedgerDaemon, folder: Path, client: BatchClient) -> None:
    """Three more workers cannot play the groups of the learner's next step."""
    async with aiohttp.ClientSession() as http:
        stage = Stage(daemon, folder, http)
        sessions = [await stage.register(name, Costly().hash) for name in ("failing 1", "failing 2", "failing 3")]
        await stepped(client, STEPS + 1)
        for session in sessions:
            [(lease, _)] = await stage.lease(session, served=f"0.{STEPS + 1}", manifest=digest_of(f"0.{STEPS + 1}"))
            why = {"lease": lease.hex(), "reason": "failed play", "detail": "KeyError: 'card'"}
            returned = {"session": session, "leases": [lease.hex()], "reasons": [why]}
            assert await stage.ask("/v1/return", returned) == (200, {})


async def stepped(client: BatchClient, step: int) -> RolloutBatch:
    """The learner takes a batch and publishes the version of ``step``."""
    batch = await asyncio.to_thread(client.take, step - 1)
    assert batch is not None
    await asyncio.to_thread(client.applied, batch, step)
    await asyncio.to_thread(client.publish, Version(0, step), bytes.fromhex(digest_of(f"0.{step}")))
    return batch


async def learnt(client: BatchClient, engine: FakeEngine, probes: EngineProbes, record: RunLog) -> None:
    """Steps of a learner: a batch, a version, a probe of the engine."""
    probe_set = await asyncio.to_thread(found_set)
    for step in range(1, STEPS + 1):
        batch = await stepped(client, step)
        version = Version(0, step)
        engine.versions = [str(version)]
        probes.published(step, 0, learner_scores(probe_set, version))
        await asyncio.to_thread(client.ack, step, [batch.id], bytes(32))
        while len(record.record.probes) < step:
            await asyncio.to_thread(probes.look)
            await asyncio.sleep(0.01)


async def faults_of_queries(prometheus: Prometheus, values: dict[str, str]) -> dict[str, str]:
    """By panel and query of the dashboard: no series, or series that lack a label of the legend."""
    faults = {}
    for target in targets():
        found = await prometheus.query(filled(target.expr, values, INTERVAL_S))
        if not found or not all(target.legend_labels <= row["metric"].keys() for row in found):
            faults[f"{target.panel}: {target.expr}"] = f"{found[:1]}"
    return faults


async def without_series(prometheus: Prometheus, values: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    """Queries of the dashboard that have a fault now, and had one ``before``."""
    for _ in range(TRIES):
        faults = await faults_of_queries(prometheus, values)
        faults = {query: found for query, found in faults.items() if query in before}
        if not faults:
            break
        await prometheus.scraped(1)
    return faults


async def until_no_alert_is_pending(prometheus: Prometheus) -> None:
    """No alert has fired. A busy machine may delay a scrape, so an alert may be pending at one look, not at each."""
    for _ in range(TRIES):
        rules = {rule["name"]: (rule["health"], rule["state"]) for rule in await prometheus.rules()}
        assert rules.keys() == {rule["alert"] for rule in alert_rules()}
        assert set(rules.values()) <= {("ok", "inactive"), ("ok", "pending")}, rules
        if set(rules.values()) == {("ok", "inactive")}:
            return
        await prometheus.scraped(1)
    raise AssertionError(rules)


async def test_each_panel_has_series_and_no_alert_is_pending_on_a_healthy_run(
    swarm: Swarm, states, prometheus: Prometheus, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHECK_S", "ASK_S"):
        monkeypatch.setattr(probe_loop, name, 0.01)
    monkeypatch.setattr(ledger_view, "IDLE_LOOKS", 10**6)  # the learner ends before the other parts of the run
    engine.versions = ["0.0"]
    swarm.plaintext = False  # certificates have an end behind TLS alone
    mirror = f"file://{tmp_path}/mirror"
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up(commit="barrier", mirror=mirror)
    peers = await swarm.peers_up("a", "b", mirror=mirror)
    await swarm.live("0.1")
    folder = tmp_path / "ledger"
    async with running(ledger_config(folder)) as ledger:
        prometheus.scrape(*(daemon.http.address for daemon in (hub, *peers, ledger)))
        await prometheus.start()
        await prometheus.scraped(1)
        client = client_of(ledger, folder)
        await begun(client)
        await rejected_result(ledger, folder)
        with RunLog(tmp_path / LOG_NAME) as log:
            probe_set = await asyncio.to_thread(found_set)
            probes = EngineProbes(probes_of(ledger, folder / "http.token"), probe_set, log.write)
            async with working(ledger, folder, engine):
                await learnt(client, engine, probes, log)
                for step in VERSIONS:
                    state = states.trained(state, step)
                    swarm.publish(step, state)
                    await swarm.live(f"0.{step}")
                await swarm.mirrored(f"0.{VERSIONS[-1]}")
                await prometheus.scraped(ENOUGH)
                await until_no_alert_is_pending(prometheus)
        everything = dict.fromkeys(variables(), chosen([]))
        before = await faults_of_queries(prometheus, everything)
        broken = await swarm.peer_up("c", targets=(BROKEN,))
        prometheus.scrape(broken.http.address)
        await swarm.until(lambda: bool(broken.startup.timeline.refused_installs), "the engine has refused an install")
        await rejected_job(ledger, folder, client)
        monkeypatch.setattr(ledger_view, "IDLE_LOOKS", 1)
        await swarm.until(lambda: bool(ledger.view.idle()), "the ledger is idle")
        await prometheus.scraped(ENOUGH)
        alerts = {rule["name"]: rule["state"] for rule in await prometheus.rules()}
        for name in ("P2pcastInstallsRefused", "P2pcastJobsRejected"):
            assert alerts[name] == "firing"
        assert alerts["P2pcastLedgerIdle"] == "pending"
        assert await without_series(prometheus, everything, before) == {}
        listed: dict[str, list[str]] = {}
        for name, (selector, label) in variables().items():
            values = {known: chosen(found) for known, found in listed.items()}
            listed[name] = await prometheus.label_values(filled(selector, values, INTERVAL_S), label)
        assert {name: len(found) for name, found in listed.items()} == {"job": 1, "instance": 5, "peer": 3}
        assert await without_series(prometheus, {name: chosen(found) for name, found in listed.items()}, before) == {}
