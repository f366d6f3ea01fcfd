"""The ledger waits while its database or its hub fails, names the fault, and goes on without a loss."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from ledger_stage import END_S, Up, config_of
from parity_task import Parity
from test_ledger_requests import MANIFEST, Stage, played

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Result
from tests.daemons.metrics_guide import documented, served
from tests.support.fake_engine import digest_of
from tests.support.until import until
from tests.trainer_node.ledger.postgresql_cluster import Cluster, postgresql
from trainer_node.ledger_server.ledger_daemon import opened
from trainer_node.scheduling.served_versions import EngineId, KnownEngine


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with postgresql() as made:
        yield made


class Hub:
    """Answers /versions with whatever the test says."""

    def __init__(self) -> None:
        self.status, self.run = 200, "ab" * 16
        self.manifests = {"0.0": MANIFEST.hex()}
        self.engines: dict[str, Any] = {}
        self.url = ""

    async def versions(self, _: web.Request) -> web.Response:
        answer = {"run": self.run, "manifests": self.manifests, "schedules": {}, "engines": self.engines, "evicted": []}
        return web.json_response(answer, status=self.status)

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/versions", self.versions)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()


@pytest.fixture
async def hub() -> Any:
    found = Hub()
    found.url = await found.start()
    yield found
    await found.stop()


async def until_readiness(stage: Stage, status: int, text: str) -> None:
    """Wait until /readyz answers with ``status``, and ``text`` in its line."""
    await until(lambda: stage.read("/readyz"), holds=lambda found: found[0] == status and text in found[1])


async def resumed(stage: Stage) -> None:
    assert (await stage.ask("/v1/learner/resume", {"branch": 0, "step": 0, "batches": []}, "trainer"))[0] == 200
    stage.session = await stage.register("w")


async def test_a_database_that_restarts_delays_the_ledger_alone(cluster: Cluster, tmp_path: Path, up: Up) -> None:
    config = config_of(tmp_path, database=cluster.database())
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        await stage.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        [(lease, job)] = await stage.lease(stage.session)
        result = await played(lease, job)
        await asyncio.to_thread(cluster.stop)
        await until_readiness(stage, 503, "database failed")
        status, answer = await stage.hand_in(stage.session, result)
        assert (status, "database failed" in answer["error"]) == (503, True)
        await asyncio.to_thread(cluster.start)
        await until_readiness(stage, 200, "")
        status, answer = await stage.hand_in(stage.session, result)
        assert (status, answer["results"][0]["verdict"]) == (200, "accepted")
        assert (await stage.read("/healthz"))[0] == 200


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Take all the room of a disk with one file."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


async def until_health(stage: Stage, status: int) -> str:
    return str((await until(lambda: stage.read("/healthz"), holds=lambda found: found[0] == status))[1])


async def test_a_full_disk_makes_the_ledger_unhealthy_and_loses_nothing(small_disk: Path, up: Up) -> None:
    async with asyncio.timeout(END_S), up(config_of(small_disk)) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, small_disk, http)
        await resumed(stage)
        await stage.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        kept, lost = await stage.lease(stage.session, slots=2)
        first, second = [await played(*one) for one in (kept, lost)]
        assert (await stage.hand_in(stage.session, first))[0] == 200
        filler = fill(small_disk)
        about = {"slots": 4, "task": "parity", "task_hash": Parity().hash.hex()}
        for number in range(200):  # the newest pages of the database's log have room for a few rows
            status, _ = await stage.ask("/v1/workers", about | {"name": f"w{number}"})
            if status != 200:
                break
        assert status == 503
        assert (await stage.hand_in(stage.session, second))[0] == 503
        text = await until_health(stage, 503)
        assert text.startswith("unhealthy: task '")
        assert "make room on the disk" in text
        _, status = await stage.get("/v1/status", "trainer")
        assert "disk" in [row["task"] for row in status["short"]]
        _, metrics = await stage.read("/metrics")
        assert "p2pcast_healthy 0.0" in metrics
        filler.unlink()
        await until_health(stage, 200)
        status, answer = await stage.hand_in(stage.session, second)
        assert (status, answer["results"][0]["verdict"]) == (200, "accepted")
        status, answer = await stage.hand_in(stage.session, first)
        assert (status, answer["results"][0]["verdict"]) == (200, "accepted"), "the first one was kept"
        _, metrics = await stage.read("/metrics")
        assert "p2pcast_healthy 1.0" in metrics


@pytest.mark.parametrize("status", [500, 401, 302])
async def test_results_wait_while_the_hub_answers_wrongly(tmp_path: Path, up: Up, hub: Any, status: int) -> None:
    config = config_of(tmp_path, hub=hub.url)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        [(lease, job)] = await stage.lease(stage.session)
        result = await played(lease, job)
        (span,) = result.spans
        newer = span._replace(version=Version(0, 1), manifest=bytes.fromhex(digest_of("0.1")))
        ahead = Result(**{name: getattr(result, name) for name in Result._reads} | {"spans": (newer,)})
        hub.status = status
        found, answer = await stage.hand_in(stage.session, ahead)
        assert (found, "cannot ask the hub" in answer["error"]) == (503, True)
        hub.status, hub.manifests = 200, hub.manifests | {"0.1": digest_of("0.1")}
        _, answer = await stage.hand_in(stage.session, ahead)
        assert answer["results"][0]["verdict"] == "accepted", answer


async def test_a_worker_is_believed_as_far_as_the_hub_knows_its_engine(tmp_path: Path, up: Up, hub: Any) -> None:
    """The engine switches to version 0.1, its worker asks at once, and the hub learns of the switch while the request
    waits.
    """
    node, engine = "e0" * 16, {"node": "e0" * 16, "name": "vllm:e"}
    hub.manifests = {"0.0": MANIFEST.hex(), "0.1": digest_of("0.1")}
    stated = {"served": "0.1", "manifest": digest_of("0.1")}
    policy = dataclasses.replace(config_of(tmp_path).policy, rule="strict")
    config = dataclasses.replace(config_of(tmp_path, hub=hub.url), policy=policy)

    def know(served: str | None) -> None:
        hub.engines = {node: {"staged": "0.1", "engines": {"vllm:e": served}}}

    know("0.0")
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        await until_readiness(stage, 200, "")
        assert await stage.lease(stage.session, engine=engine, **stated, wait_s=0.0) == []
        waiting = asyncio.create_task(stage.lease(stage.session, engine=engine, **stated, wait_s=30.0))
        await until(lambda: len(daemon._queue))
        know("0.1")
        [(_, job)] = await waiting
        assert job.oldest == Version(0, 1)
        another = engine | {"name": "vllm:another"}
        assert len(await stage.lease(stage.session, engine=another, **stated)) == 1, "the worker's statement counts"
        know(None)
        await until(lambda: daemon._hub.engine(EngineId(node, "vllm:e")) == KnownEngine(None, Version(0, 1)))
        assert await stage.lease(stage.session, engine=engine, **stated, wait_s=0.0) == []
        assert len(await stage.lease(stage.session, engine=another, **stated)) == 1


@pytest.mark.parametrize(
    "engine", ["e", {}, {"node": "e0", "name": "e"}, {"node": "e0" * 16, "name": ""}, {"node": "e0" * 16, "name": 5}]
)
async def test_a_malformed_engine_is_refused(tmp_path: Path, up: Up, engine: Any) -> None:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        body = {"session": stage.session, "slots": 1, "served": "0.0", "manifest": MANIFEST.hex(), "engine": engine}
        status, answer = await stage.ask("/v1/lease", body)
        assert (status, "engine" in answer["error"]) == (400, True)


async def test_a_task_that_changed_on_disk_rejects_no_result(tmp_path: Path, up: Up) -> None:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        await stage.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        [(lease, job)] = await stage.lease(stage.session)
        result, own = await played(lease, job), daemon._scorers._hash
        daemon._scorers._hash = bytes(32)
        status, answer = await stage.hand_in(stage.session, result)
        assert (status, "has changed on disk" in answer["error"]) == (503, True)
        await until_readiness(stage, 503, "has changed on disk")
        daemon._scorers._hash = own
        await until_readiness(stage, 200, "")
        status, answer = await stage.hand_in(stage.session, result)
        assert (status, answer["results"][0]["verdict"]) == (200, "accepted")


async def test_a_ledger_of_another_run_ends_with_the_reason(tmp_path: Path, hub: Any) -> None:
    (tmp_path / "ledger.json").write_text('{"run": "%s"}' % ("00" * 16))
    async with asyncio.timeout(END_S), opened(config_of(tmp_path, hub=hub.url)) as daemon:
        with pytest.raises(ExceptionGroup) as found:
            await daemon.run()
    [error] = found.value.exceptions
    assert isinstance(error, RefusedError)
    assert "is of run ababab" in str(error)


async def test_every_metric_of_the_ledger_is_in_the_guide(tmp_path: Path, up: Up) -> None:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        async with http.get(f"http://127.0.0.1:{daemon.http.address[1]}/metrics") as answer:
            found = served(await answer.text())
    guide = documented()
    mine = {name for name in guide if name.startswith("p2pcast_ledger_")}
    assert mine == {name for name in found if name.startswith("p2pcast_ledger_")}
    assert {name: guide[name] for name in mine if found[name]} == {name: found[name] for name in mine if found[name]}


async def test_events_tell_a_step(tmp_path: Path, up: Up) -> None:
    async with asyncio.timeout(END_S), up(config_of(tmp_path)) as daemon, aiohttp.ClientSession() as http:
        stage = Stage(daemon, tmp_path, http)
        await resumed(stage)
        await stage.ask("/v1/versions", {"version": "0.0", "manifest": MANIFEST.hex()}, "trainer")
        url = f"http://127.0.0.1:{daemon.http.address[1]}/events?since=0"
        kinds: list[str] = []
        async with http.get(url) as answer:
            while len(kinds) < 3:
                line = (await answer.content.readline()).decode()
                if line.startswith("event: "):
                    kinds.append(line.removeprefix("event: ").strip())
    assert kinds == ["learner_resumed", "worker_registered", "version_known"]
