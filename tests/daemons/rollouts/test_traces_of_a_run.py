"""One id for a version and one for a job, in what hub, peer, ledger and worker tell: traces, logs, events, metrics."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from ledger_stage import Up, config_of
from parity_task import NAME

from p2pcast.process.trace_ids import version_trace
from p2pcast.telemetry import span_export
from tests.daemons.conftest import Swarm, first_state
from tests.p2pcast.telemetry.collector import Collector, attributes
from tests.support.fake_engine import FakeEngine
from trainer_node.ledger_server.callers import WORKER_FILE

ROOT = Path(__file__).parents[3]
END_S = 600.0


async def text_of(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return await answer.text()


async def first_event(url: str) -> Any:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/events?since=0") as answer:
        async for line in answer.content:
            if line.startswith(b"data:"):
                return json.loads(line.removeprefix(b"data:"))
    return None


async def test_one_id_joins_the_traces_of_all_daemons(swarm: Swarm, up: Up, engine: FakeEngine, monkeypatch) -> None:
    collector = Collector()
    await collector.start()
    monkeypatch.setattr(span_export, "EXPORT_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    engine.versions = ["0.0"]
    hub, folder = await swarm.hub_up(), swarm.folder / "ledger"
    peer = await swarm.peer_up("a")
    swarm.publish(0, first_state())
    await swarm.live("0.0")
    run = hub.token.run.hex()
    urls = {"hub": f"http://127.0.0.1:{hub.http.address[1]}", "peer": f"http://127.0.0.1:{peer.http.address[1]}"}
    config = config_of(folder, hub=urls["hub"], hub_bearer=hub.http.access.bearer)
    async with asyncio.timeout(END_S), up(config) as daemon:
        urls["ledger"] = f"http://127.0.0.1:{daemon.http.address[1]}"
        head = {"Authorization": f"Bearer {(folder / 'http.token').read_text().strip()}"}
        begins = {"branch": 0, "step": 0, "batches": []}
        async with (
            aiohttp.ClientSession(headers=head) as http,
            http.post(f"{urls['ledger']}/v1/learner/resume", json=begins) as answer,
        ):
            assert answer.status == 200
        log = swarm.folder / "worker.log"
        with log.open("wb") as file:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "p2pcast.cli", "--log-format", "json", "work"),
                *(urls["ledger"].removeprefix("http://"), "--engine", engine.url, "--peer", urls["peer"][7:]),
                *("--task", NAME, "--name", "w", "--slots", "4", "--bearer-file", str(folder / WORKER_FILE)),
                cwd=ROOT,
                stderr=file,
            )
        await swarm.until(lambda: len(collector.named("play")) >= 4, "plays have spans")
        await swarm.until(lambda: collector.named("install"), "the install has a span")
        texts = [await text_of(f"{url}/metrics") for url in urls.values()]
        told = [await first_event(url) for url in urls.values()]
        worker.terminate()
        assert await worker.wait() == 0
    await collector.stop()

    trace = version_trace(run, "0.0").to_bytes(16, "big")
    spans = {one.name: one for _, _, one in collector.spans if one.trace_id == trace}
    assert spans.keys() == {"publish", "deliver", "serve", "receive", "stage", "install"}
    assert spans["deliver"].parent_span_id == spans["publish"].span_id
    for name in ("serve", "receive", "stage", "install"):
        assert spans[name].parent_span_id == spans["deliver"].span_id
    services = {(service, one.name) for service, _, one in collector.spans}
    assert {("p2pcast-hub", "publish"), ("p2pcast-peer", "install"), ("p2pcast-worker", "play")} <= services

    jobs = {one.trace_id.hex() for one in collector.named("play")}
    good = [one for one in collector.named("play") if one.links]
    assert good
    facts = attributes(good[0])
    assert facts["p2pcast.run"] == run
    assert (good[0].links[0].trace_id, good[0].links[0].span_id) == (trace, spans["publish"].span_id)
    assert facts["p2pcast.job"] in jobs
    assert facts["p2pcast.sampled_tokens"] > 0

    assert all(f'p2pcast_run_info{{run="{run}"}} 1.0' in text for text in texts)
    assert [event["run"] for event in told] == [run] * 3
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    registered = next(line for line in lines if "registered at the ledger" in line["message"])
    assert (registered["role"], registered["name"]) == ("worker", "w")
    assert registered["run"] == run
