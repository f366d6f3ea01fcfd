"""A real vLLM server that an orchestrator pauses and resumes itself, as prime-rl does, while a hub publishes and
clients stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

sys.path.append(str(Path(__file__).parents[2] / "rollout_node" / "vllm"))

from real_server import Server, load, make_model, one_off_connections

from p2pcast.ground.version import Version

pytestmark = [pytest.mark.vllm, pytest.mark.prove]  # test_vllm_life.py is the sample

VERSIONS = 5
CLIENTS = 4


class Orchestrator:
    """Pauses, has the peer commit, resumes. Of p2pcast it uses only ``POST /commit`` and the bearer token."""

    def __init__(self, http: aiohttp.ClientSession, server: str, peer: str, bearer: str) -> None:
        self._headers = {"Authorization": f"Bearer {bearer}"}
        self._http, self._server, self._peer = http, server, peer
        self.pauses = 0

    async def switch(self, version: str) -> dict:
        await self.pause()
        try:
            return await self.commit(version)
        finally:
            assert await self.is_paused()  # still paused
            await self.resume()

    async def pause(self) -> None:
        self.pauses += 1
        async with self._http.post(f"{self._server}/pause?mode=keep&clear_cache=false") as answer:
            assert answer.status == 200

    async def resume(self) -> None:
        async with self._http.post(f"{self._server}/resume") as answer:
            assert answer.status == 200

    async def is_paused(self) -> bool:
        async with self._http.get(f"{self._server}/is_paused") as answer:
            return bool((await answer.json())["is_paused"])

    async def commit(self, version: str, *, timeout_s: float = 60.0, status: int = 200) -> dict:
        body = {"version": version, "timeout_s": timeout_s}
        async with self._http.post(f"{self._peer}/commit", json=body, headers=self._headers) as answer:
            found = await answer.json()
            assert answer.status == status, found
            return dict(found)


@pytest.fixture
async def server(swarm) -> AsyncIterator[Server]:
    """Up before the peer ``a`` is."""
    (swarm.folder / "a").mkdir(0o700)
    found = Server(await asyncio.to_thread(make_model, swarm.folder / "model"), swarm.folder / "a")
    try:
        await asyncio.to_thread(found.wait)
        yield found
    finally:
        await asyncio.to_thread(found.stop)


def asked(server: Server, route: str) -> int:
    """Number of requests for the route in the server's own log."""
    return len(re.findall(rf'"POST /{route}[? ]', server.log.read_text()))


async def test_an_orchestrator_may_pause_its_own_engine(swarm, states, server, p2pcast):
    state = states.read(server.model)
    files = {p.name: p.read_bytes() for p in server.model.iterdir() if p.suffix == ".json" and "index" not in p.name}
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a", driver="external", targets=(f"vllm:{server.url}",))
    runner = peer.runners[0]

    async def staged(step: int) -> None:
        await swarm.until(
            lambda: str(runner.staged) == f"0.{step}" and runner.waits_for == "commit", f"0.{step} is staged"
        )

    async def awaited(step: int, switching: asyncio.Task[dict]) -> None:
        """Until the peer has taken up the order: an earlier publication may overtake it."""
        await swarm.until(
            lambda: peer.engine.requests.requested(Version(0, step)) or switching.done(), f"a caller waits for 0.{step}"
        )

    def publish(step: int) -> None:
        nonlocal state
        swarm.publish(step, state, files)
        state = states.trained(state, step)

    publish(0)
    await staged(0)
    enough = asyncio.Event()
    async with one_off_connections() as http:
        url, bearer = "http://{}:{}".format(*peer.http.address), peer.http.access.bearer
        orchestrator = Orchestrator(http, server.url, url, bearer)
        # The first whole state goes in under the orchestrator's pause too.
        assert (await orchestrator.switch("newest"))["version"] == "0.0"
        assert runner.ready
        publish(1)
        await staged(1)
        # Not paused: the commit is refused, and the engine keeps its version.
        late = await orchestrator.commit("0.1", timeout_s=1.0, status=504)
        assert "not paused" in late["error"]
        assert str(runner.installer.committed) == "0.0"
        assert not await orchestrator.is_paused()

        began = [asyncio.Event() for _ in range(CLIENTS)]
        clients = [asyncio.create_task(load(http, server.url, f"w{n}", e, enough)) for n, e in enumerate(began, 10)]
        await asyncio.gather(*(e.wait() for e in began))
        pauses = []
        for step in range(1, VERSIONS + 1):
            await staged(step)
            switching = asyncio.create_task(orchestrator.switch(f"0.{step}"))
            await awaited(step, switching)
            publish(step + 1)
            answer = await switching
            assert answer["version"] == f"0.{step}"
            pauses.append(answer["pause_s"])
            assert runner.holds(runner.versions[-1])
            assert str(runner.versions[-1]) == f"0.{step}"
        await staged(VERSIONS + 1)
        enough.set()
        assert min(await asyncio.gather(*clients)) >= 1  # none failed
        assert not await orchestrator.is_paused()
    assert [str(v) for v in runner.versions] == [f"0.{s}" for s in range(VERSIONS + 1)]
    assert asked(server, "pause") == asked(server, "resume") == orchestrator.pauses == VERSIONS + 1
    assert len([p for p in pauses if p > 0]) == VERSIONS

    hub_url = "http://{}:{}".format(*hub.http.address)
    done = await asyncio.to_thread(
        p2pcast, "verify", "--live", "--state", swarm.folder / "a", "--hub", hub_url, "--json"
    )
    assert done.returncode == 0, done.stderr
    (engine,) = json.loads(done.stdout)["engines"]
    assert (engine["version"], engine["wrong"], engine["unknown"]) == (f"0.{VERSIONS}", [], [])

    # The audit has undone the preparation of the next version; a reload in the midst of the next one would be noticed.
    await staged(VERSIONS + 1)
    # The server reloads its first folder: the label stays, the weights change.
    async with (
        one_off_connections() as http,
        http.post(f"{server.url}/collective_rpc", json={"method": "reload_weights"}) as answer,
    ):
        assert answer.status == 200, await answer.text()
    done = await asyncio.to_thread(p2pcast, "verify", "--live", "--state", swarm.folder / "a")
    assert done.returncode == 3, done.stdout
    assert f"differs from version 0.{VERSIONS}" in done.stderr
    assert (await swarm.get(peer, "/readyz"))[0] == 503
    await staged(VERSIONS + 1)
    async with one_off_connections() as http:
        url, bearer = "http://{}:{}".format(*peer.http.address), peer.http.access.bearer
        orchestrator = Orchestrator(http, server.url, url, bearer)
        assert (await orchestrator.switch("newest"))["version"] == f"0.{VERSIONS + 1}"
    assert (await swarm.get(peer, "/readyz"))[0] == 200
