"""The unchanged examples for slime and prime-rl, with a real hub, peer, proxy and ledger. Both frameworks need CUDA, so
programs that play them stand in their place in the examples' commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from netem.fleet.processes import free_port
from p2pcast.ground.version import Version
from tests.daemons.conftest import differing, first_state, read, trained
from tests.environments import ROOT
from tests.support.until import check_runs, until
from tests.trainer_node.frameworks.bridge_stage import filled_ledger

HERE, EXAMPLES = Path(__file__).parent, ROOT / "examples"
END_S = 900.0


class Run:
    """An example in ``folder``, and the peer of one rollout machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights, self.out = folder, folder / "weights", folder / "out"
        self.hub, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._running: list[asyncio.subprocess.Process] = []

    async def _start(self, name: str, *words: Any, **environment: str) -> asyncio.subprocess.Process:
        with open(self.folder / f"{name}.log", "ab") as log:  # noqa: ASYNC230 - a local file
            process = await asyncio.create_subprocess_exec(
                *map(str, words), cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            )  # fmt: skip
        self._running.append(process)
        return process

    async def example(self, name: str, *command: Any, **environment: str) -> None:
        """Runs the example, with a peer once the hub has made its token."""
        token = self.folder / "token"
        given = {
            "PYTHON": sys.executable,
            "TOKEN_FILE": str(token),
            "LISTEN": self.hub,
            "HTTP": self.http,
            "STATE": str(self.folder / "hub"),
        }
        marks = ("--step-marker", "prime-rl") if "prime" in name else ("--step-names", "weight_v{step:06}")
        async with asyncio.timeout(END_S):
            running = await self._start(name, EXAMPLES / name, *command, **(given | environment))
            await until(token.exists, lambda: self.said(name), check=lambda: check_runs(running))
            words = ["join", self.hub, "--token-file", token, *marks, "--install", f"safetensors:{self.out}"]
            words += ["--state", self.folder / "peer", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
            peer = await self._start("peer", sys.executable, "-m", "p2pcast.cli", *words)
            assert await running.wait() == 0, self.said(name) + self.said("peer")
            peer.terminate()
            await peer.wait()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    async def stop(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Run]:
    run = Run(folder)
    try:
        yield run
    finally:
        await run.stop()


async def test_slime_trains_on_a_ledger_and_its_weights_arrive(tmp_path: Path) -> None:
    save, state, out = tmp_path / "save", tmp_path / "ledger", tmp_path / "said.json"
    save.mkdir()
    state.mkdir()
    served = Version(0, 1)
    async with filled_ledger(state, served=served) as ledger, stage(tmp_path) as run:
        await ledger.publish(served)
        words = {
            "WEIGHTS": str(run.weights),
            "LEDGER": ledger.url,
            "BEARER_FILE": str(ledger.bearer),
            "SAVE": str(save),
        }
        await run.example("slime_trainer.sh", sys.executable, HERE / "played_slime.py", out, **words)
    assert json.loads(out.read_text()) == {"versions": [1, 2], "samples": [8, 8]}
    weights = trained(trained(first_state(), 1), 2)
    assert differing(read(run.out / "weight_v000002"), weights) == []


async def test_servers_of_prime_rl_load_the_hosts_folder(tmp_path: Path) -> None:
    loaded: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/update_weights":
            loaded.append((await request.json())["weight_dir"])
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with stage(tmp_path) as run:
            words = {
                "BROADCASTS": str(run.weights / "broadcasts"),
                "ENGINES": f"http://{host}:{port}",
                "FOLDER": str(run.out),
                "PORT": str(free_port()),
            }
            await run.example("prime_rl_trainer.sh", sys.executable, HERE / "played_prime_rl.py", run.weights, **words)
    finally:
        await runner.cleanup()
    assert loaded == [str(run.out / "step_1")]
    assert differing(read(run.out / "step_1"), first_state()) == []
