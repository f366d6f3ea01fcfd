"""prime-rl's orchestrator, an inference server and the proxy between them, with a real hub and a real peer. The server
reads folders as prime-rl's does: the safetensors files of a path.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from p2pcast.checkpoint.folder_form import MARKERS, FolderForm
from tests.daemons.conftest import State, Swarm, differing, first_state, read, trained, write
from trainer_node.frameworks import prime_rl
from trainer_node.frameworks.prime_rl import Broadcasts, serving

FORM = FolderForm(marker=MARKERS["prime-rl"])


class Server:
    """An inference server of prime-rl: ``calls`` in order, ``loaded`` weights."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded: State = {}
        self.paused = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.raw_path}")
        match request.path:
            case "/pause" | "/resume":
                self.paused = request.path == "/pause"
            case "/update_weights":
                assert self.paused
                self.loaded = read(Path((await request.json())["weight_dir"]))
            case "/echo":
                body = await request.read()
                response = web.StreamResponse(status=207, headers={"X-Seen": request.headers.get("X-Sent", "")})
                await response.prepare(request)
                for at in range(0, len(body), 100_000):
                    await response.write(body[at : at + 100_000])
                return response
            case "/break":
                response = web.StreamResponse(headers={"Content-Length": "100"})
                await response.prepare(request)
                await response.write(b"x" * 10)
                assert request.transport is not None
                request.transport.abort()
                return response
            case "/moved":
                return web.Response(status=302, headers={"Location": "/echo"})
        return web.json_response({"status": "ok"})


@asynccontextmanager
async def server_and_proxy(swarm: Swarm, folder: Path | None) -> AsyncIterator[tuple[Server, aiohttp.ClientSession]]:
    server = Server()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    hub = "http://{}:{}".format(*swarm.hub.control.http.address)
    async with (
        serving([(("127.0.0.1", 0), url)], Broadcasts(swarm.checkpoints, hub), folder) as addresses,
        aiohttp.ClientSession("http://{}:{}".format(*addresses[0])) as session,
    ):
        try:
            yield server, session
        finally:
            await runner.cleanup()


def broadcast(swarm: Swarm, step: int, state: State) -> Path:
    """As the trainer of prime-rl writes it: in place, between the markers."""
    folder = swarm.checkpoints / f"step_{step}"
    folder.mkdir()
    for marker in FORM.marker.before:
        (folder / marker).touch()
    shutil.copy(write(swarm.folder / "saved", state) / "model.safetensors", folder)
    (folder / FORM.marker.last).touch()
    return folder


async def switched(session: aiohttp.ClientSession, folder: Path) -> list[int]:
    """The calls of prime-rl's orchestrator for a version."""
    codes = []
    for path, body in (
        ("/pause?mode=keep&clear_cache=false", None),
        ("/update_weights", {"weight_dir": str(folder)}),
        ("/resume", None),
    ):
        async with session.post(path, json=body) as answer:
            codes.append(answer.status)
    return codes


async def test_a_server_loads_the_finished_folder(swarm: Swarm) -> None:
    """After a resume the trainer deletes later steps, and writes their numbers again with other bytes."""
    await swarm.hub_up(folder_form=FORM)
    await swarm.peer_up("a", folder_form=FORM)
    states = {step: trained(first_state(), step) for step in (1, 2, 3)}
    async with server_and_proxy(swarm, swarm.out("a")) as (server, session):
        for step, state in states.items():
            assert await switched(session, broadcast(swarm, step, state)) == [200, 200, 200]
            assert differing(server.loaded, state) == []
        for step in (2, 3):
            shutil.rmtree(swarm.checkpoints / f"step_{step}")
        again = trained(first_state(), 77)
        assert await switched(session, broadcast(swarm, 2, again)) == [200, 200, 200]
        assert differing(server.loaded, again) == []
        assert server.calls[:3] == ["POST /pause?mode=keep&clear_cache=false", "POST /update_weights", "POST /resume"]


async def test_a_server_is_not_paused_before_rollout_hosts_have_the_folder(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prime_rl, "PAUSE_WAIT_S", 0.2)
    monkeypatch.setattr(prime_rl, "UPDATE_WAIT_S", 0.2)
    await swarm.hub_up(folder_form=FORM)
    async with server_and_proxy(swarm, swarm.out("a")) as (server, session):
        async with session.post("/pause") as answer:
            assert answer.status == 200, "there is no broadcast yet"
        folder = broadcast(swarm, 1, first_state())
        assert await switched(session, folder) == [503, 503, 200]
        assert server.calls == ["POST /pause", "POST /resume"]
        monkeypatch.undo()
        pausing = asyncio.create_task(switched(session, folder))
        await swarm.published("0.1")
        assert not pausing.done()
        assert not any("update" in call for call in server.calls)
        await swarm.peer_up("a", folder_form=FORM)
        assert await pausing == [200, 200, 200]
        assert differing(server.loaded, first_state()) == []


async def test_other_requests_pass_without_changes(swarm: Swarm) -> None:
    await swarm.hub_up(folder_form=FORM)
    async with server_and_proxy(swarm, None) as (server, session):
        body = os.urandom(3_000_000)
        async with session.post(
            URL("/echo?a=%2F&b=c%20d", encoded=True), data=io.BytesIO(body), headers={"X-Sent": "yes"}
        ) as answer:
            assert answer.status == 207
            assert answer.headers["X-Seen"] == "yes"
            assert await answer.read() == body
        assert server.calls == ["POST /echo?a=%2F&b=c%20d"]
        async with session.get("/moved", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (302, "/echo")
        async with session.head("/health") as answer:
            assert answer.status == 200
        async with session.post("/update_weights", json={"weight_dir": None}) as answer:
            assert answer.status == 500, "it passes: the weights come by another transport; the server is not paused"
        with pytest.raises(aiohttp.ClientError):
            async with session.get("/break") as answer:
                await answer.read()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"weight_dir": 7}', b'{"weight_dir": ["x"]}', b"[" * 50_000])
async def test_a_malformed_request_for_new_weights_is_refused(swarm: Swarm, body: bytes) -> None:
    await swarm.hub_up(folder_form=FORM)
    async with server_and_proxy(swarm, None) as (server, session):
        async with session.post("/update_weights", data=body) as answer:
            assert answer.status == 400
        async with session.post("/update_weights", json={"weight_dir": "/x/elsewhere"}) as answer:
            assert answer.status == 400
            assert "--step-names" in (await answer.json())["error"]
        async with session.post("/update_weights", data=b" " * 100_000) as answer:
            assert answer.status == 413
        assert server.calls == []


async def test_a_dead_server_is_named(swarm: Swarm) -> None:
    await swarm.hub_up(folder_form=FORM)
    broadcasts = Broadcasts(swarm.checkpoints, "http://127.0.0.1:1")
    broadcast(swarm, 1, first_state())
    async with (
        serving([(("127.0.0.1", 0), "http://127.0.0.1:1")], broadcasts, None) as addresses,
        aiohttp.ClientSession("http://{}:{}".format(*addresses[0])) as session,
    ):
        async with session.get("/health") as answer:
            assert answer.status == 502
            assert "http://127.0.0.1:1 does not answer" in (await answer.json())["error"]
        async with session.post("/pause") as answer:
            assert answer.status == 503, "the hub is out of reach"


async def test_the_command_serves_until_its_signal(tmp_path: Path) -> None:
    async def run(*words: Any) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trainer_node.frameworks.prime_rl", tmp_path, *words, stdout=-1, stderr=-1
        )

    proxy = await run("--engine", "127.0.0.1:0=http://127.0.0.1:1")
    assert proxy.stdout is not None
    line = (await proxy.stdout.readline()).decode()
    assert line.startswith("127.0.0.1:")
    assert line.endswith(" stands for http://127.0.0.1:1\n")
    proxy.send_signal(signal.SIGTERM)
    assert await proxy.wait() == 0
    wrong = await run("--engine", "http://127.0.0.1:1")
    _, errors = await wrong.communicate()
    assert (wrong.returncode, errors.decode()) == (
        2,
        "p2pcast: --engine 'http://127.0.0.1:1': write HOST:PORT=http://SERVER:PORT\n",
    )
