"""A ledger that workers of other machines reach: certificates of the run, and nothing else, give a role."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest
from ledger_stage import END_S, Up, config_of, worker_loop
from parity_task import Parity

from tests.support.fake_engine import FakeEngine, digest_of

sys.path.append(str(Path(__file__).parents[1] / "trust"))

from unknown_nodes import token_for, working

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient
from rollout_node.worker.ledger_client import LedgerClient
from tests.support.until import until
from trainer_node.ledger_server.ledger_daemon import CertificateSource, LedgerDaemon


async def secured(tls, **more):
    """Configuration of a ledger that listens with a certificate and follows the hub."""
    hub = await tls.hub_up()
    source = CertificateSource(tls.address, await token_for(hub, "ledger"), "ledger")
    folder = tls.folder / "ledger"
    http = f"http://127.0.0.1:{hub.http.address[1]}"
    return hub, config_of(folder, listen=("127.0.0.1", 0), certificate=source, hub=http, **more)


async def url_of(daemon: LedgerDaemon) -> str:
    await until(lambda: daemon.secure_address is not None)
    return f"https://127.0.0.1:{daemon.secure_address[1]}"


async def test_a_worker_with_a_certificate_plays_a_run(tls, up: Up, engine: FakeEngine) -> None:
    engine.versions = ["0.0"]
    hub, config = await secured(tls, last_step=2, staleness=3)
    worker = await working(tls, await token_for(hub, "worker"))
    token_file = tls.folder / "trainer.join"
    token_file.write_text(str(await token_for(hub, "trainer")))
    address = f"{tls.address[0]}:{tls.address[1]}"
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        url = await url_of(daemon)

        def learn() -> list[int]:
            client = BatchClient(url, hub=address, token_file=token_file, give_up_s=END_S)
            client.resume(0, 0)
            client.publish(Version(0, 0), bytes.fromhex(digest_of("0.0")))
            steps = []
            while (batch := client.take(len(steps))) is not None:
                steps.append(batch.step)
                client.applied(batch, len(steps))
            return steps

        client = LedgerClient(http, url, tls=lambda: worker.client("ledger"))
        loop = worker_loop(client, engine, "w")
        learner = asyncio.create_task(asyncio.to_thread(learn))
        await loop.run()
        assert await learner == [0, 1]
        await daemon.view.renew()
        [row] = daemon.view.workers()["workers"]
        assert (row["name"], row["caller"]) == ("w", worker.who.node.hex())


@pytest.mark.parametrize(("role", "path"), [("peer", "/v1/lease"), ("worker", "/v1/batches/take")])
async def test_another_role_is_refused_by_its_certificate(tls, up: Up, role, path) -> None:
    hub, config = await secured(tls)
    caller = await working(tls, await token_for(hub, role), role)
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        url = await url_of(daemon) + path
        sent = {"Authorization": f"Bearer {(config.state / 'http.token').read_text().strip()}"}
        async with http.post(url, json={}, ssl=caller.client("ledger"), headers=sent) as answer:
            assert answer.status == 403
            assert f"role is {role}" in (await answer.json())["error"]


async def test_an_evicted_worker_is_refused_on_its_open_connection_and_gets_no_leases(tls, up: Up) -> None:
    hub, config = await secured(tls)
    worker = await working(tls, await token_for(hub, "worker"))
    about = {"name": "w", "slots": 1, "task": "parity", "task_hash": Parity().hash.hex()}
    async with asyncio.timeout(END_S), up(config) as daemon, aiohttp.ClientSession() as http:
        url = await url_of(daemon)

        async def ask(name: str, body: dict[str, object]) -> tuple[int, dict[str, str]]:
            async with http.post(f"{url}/v1/{name}", json=body, ssl=worker.client("ledger")) as answer:
                packed = answer.content_type == "application/x-msgpack"
                return answer.status, {} if packed else await answer.json()

        status, registered = await ask("workers", about)
        assert status == 200
        session = {"session": registered["session"]}
        served = {"slots": 1, "served": "0.0", "manifest": digest_of("0.0")}
        waiting = asyncio.create_task(ask("lease", session | served | {"wait_s": 30}))
        await until(lambda: len(daemon._queue))
        await hub.state.admission.commands.evict({"peer": "w"})
        refused = await until(
            lambda: ask("heartbeat", session | {"leases": []}),
            "the ledger has asked the hub",
            holds=lambda found: found[0] != 200,
        )
        daemon._queue.changed()
        for status, answer in (refused, await waiting):
            assert (status, "evicted" in answer["error"]) == (403, True)
