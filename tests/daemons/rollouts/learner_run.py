"""A whole run as processes: hub, ledger, learner and a worker, with an engine of 16 tokens that follows the hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from parity_task import NAME

from netem.fleet.small_model import SmallModel, write_small_model
from p2pcast.ground.errors import EXIT_REFUSED
from p2pcast.ground.version import Version
from tests.support.fake_engine import VOCABULARY, FakeEngine
from tests.support.until import until
from trainer_node.learning.monitoring.run_log import read_run
from trainer_node.learning.monitoring.run_record import RunRecord

ROOT = Path(__file__).parents[3]
STALENESS, BATCH_GROUPS, GROUP_SIZE = 2, 2, 4
END_S = 600.0
CONFIG = """
[model]
path = "{model}"
threads = 1
[hub]
address = "{hub}"
token-file = "{folder}/token"
[ledger]
url = "{ledger}"
bearer-file = "{folder}/ledger/http.token"
[train]
micro-batch-tokens = 512
[optimizer]
lr = 1e-3
[checkpoint]
folder = "{folder}/learner"
every = 3
[task]
name = "{task}"
[watch]
live-limit = 0.5
"""


class FollowingEngine(FakeEngine):
    """Serves the hub's newest version, by the hashes of the hub's manifests."""

    manifests: dict[str, str] = {}  # noqa: RUF012 - of one engine a test

    async def _versions(self, request: web.Request) -> web.Response:
        answer = json.loads((await super()._versions(request)).body)  # type: ignore[arg-type]
        return web.json_response(answer | {"manifests": self.manifests})

    async def follow(self, hub: str) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                # A hub that is killed may also break off in the middle of an answer.
                with contextlib.suppress(aiohttp.ClientError, ValueError):
                    async with http.get(f"{hub}/versions") as answer:
                        self.manifests = (await answer.json())["manifests"]
                        self.versions = [max(self.manifests, key=Version.parse)] if self.manifests else ["none"]
                await asyncio.sleep(0.05)


class LearnerRun:
    """``steps``: the run's last. ``database``: the ledger's PostgreSQL. ``files``: further files of the model's folder.
    ``base_seed``: of the weights that the hub begins with; the learner's have seed 1. Each part listens where it first
    did after it was killed.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        database: str | None = None,
        files: Mapping[str, bytes] | None = None,
        base_seed: int = 1,
    ) -> None:
        self.folder, self._steps, self._database, self._files = folder, steps, database, files or {}
        self._base_seed = base_seed
        self.engine = FollowingEngine()
        self._words: dict[str, list[str]] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._following: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        folder = self.folder
        form = SmallModel(VOCABULARY, 64, 1)
        model = base = write_small_model(folder / "model", form, seed=1, dtype="bfloat16")
        if self._base_seed != 1:
            base = write_small_model(folder / "base", form, seed=self._base_seed, dtype="bfloat16")
        for name, contents in self._files.items():
            (model / name).write_bytes(contents)
        await self.engine.start()
        self._words["hub"] = ["seed", "--base", str(base), "--token-file", str(folder / "token")]
        self._words["hub"] += ["--shadow", str(folder / "shadow")]
        hub = await self._daemon("hub", "--listen", "127.0.0.1:0")
        address = await self._until(lambda: self.said("hub").partition("listening on ")[2].partition(",")[0])
        self._words["hub"] += ["--listen", address]
        self._words["ledger"] = ["ledger", "--task", NAME, "--hub-http", hub.removeprefix("http://")]
        self._words["ledger"] += ["--staleness", str(STALENESS), "--batch-groups", str(BATCH_GROUPS)]
        self._words["ledger"] += ["--group-size", str(GROUP_SIZE), "--last-step", str(self._steps)]
        self._words["ledger"] += [] if self._database is None else ["--database", self._database]
        ledger = await self._daemon("ledger")
        file = folder / "run.toml"
        file.write_text(CONFIG.format(task=NAME, model=model, hub=address, ledger=ledger, folder=folder))
        self._following = asyncio.create_task(self.engine.follow(hub))
        self._words["learner"] = ["learn", str(file)]
        engine = self.engine.url
        self._words["worker"] = ["work", ledger.removeprefix("http://"), "--task", NAME, "--slots", "8"]
        self._words["worker"] += ["--engine", engine, "--peer", engine.removeprefix("http://")]
        self._words["worker"] += ["--bearer-file", str(folder / "ledger" / "worker.token")]
        await self._start("learner")
        await self._start("worker")

    async def add_peer(self) -> None:
        """A peer that keeps the newest versions in the folder ``rollout``."""
        hub = self._words["hub"][self._words["hub"].index("--listen") + 1]
        self._words["peer"] = ["join", hub, "--token-file", str(self.folder / "token"), "--name", "peer"]
        self._words["peer"] += ["--install", f"safetensors:{self.folder / 'rollout'}", "--listen", "127.0.0.1:0"]
        self._words["peer"] += ["--shadow", str(self.folder / "peer-shadow")]
        await self._daemon("peer")

    async def _daemon(self, name: str, *first: str) -> str:
        """Started on ports that are free; from now on it is started on these. ``first``: words of the first start."""
        here, file = ["--state", str(self.folder / name)], self.folder / name / "daemon.json"
        self._words[name] += here
        await self._start(name, *first, "--http", "127.0.0.1:0")
        http = str((await self._until(lambda: json.loads(file.read_text()) if file.exists() else None))["http"])
        self._words[name] += ["--http", http.removeprefix("http://")]
        return http

    async def _start(self, name: str, *more: str) -> None:
        words = ["-m", "p2pcast.cli", *self._words[name], *more]
        with open(self.folder / f"{name}.log", "ab") as log:  # noqa: ASYNC230 - a local file
            self._running[name] = await asyncio.create_subprocess_exec(
                sys.executable, *words, cwd=ROOT, stdout=log, stderr=log
            )

    async def kill(self, names: Iterable[str]) -> None:
        """By SIGKILL, at the same time, and starts them again in this order."""
        await self.fell(names)
        for name in names:
            await self.restart(name)

    async def fell(self, names: Iterable[str]) -> None:
        """By SIGKILL, at the same time."""
        for name in names:
            assert self._running[name].returncode is None, f"{name} ended by itself: {self.said(name)}"
            self._running[name].send_signal(signal.SIGKILL)
        for name in names:
            await self._running.pop(name).wait()

    async def restart(self, name: str, *more: str) -> None:
        """With the command line of before, and ``more`` words."""
        await self._start(name, *more)

    def use_database(self, database: str) -> None:
        """The ledger's, from its next start on."""
        self._words["ledger"] += ["--database", database]

    async def until_refused(self, name: str) -> str:
        """Wait until the part has ended by itself with exit code 3; returns what it said."""
        async with asyncio.timeout(END_S):
            code = await self._running.pop(name).wait()
        assert code == EXIT_REFUSED, self.said(name)
        return self.said(name)

    async def shell(self, script: str) -> str:
        """Run commands of a page in the run's folder; returns what they print."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        started = await asyncio.create_subprocess_exec(
            "bash", "-eu", "-o", "pipefail", "-c", script, cwd=self.folder, env={**os.environ, "PATH": path},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(END_S):
            out, _ = await started.communicate()
        assert started.returncode == 0, out.decode()
        return out.decode()

    async def until_steps(self, count: int) -> None:
        """Until learners have trained so many steps, those that were trained again included."""
        await self._until(lambda: self.trained() >= count)

    def trained(self) -> int:
        """Steps that learners have trained, those that were trained again included."""
        log = self.folder / "learner" / "metrics.jsonl"
        if not log.exists():
            return 0
        record = read_run(log)
        return len(record.steps) + len(record.superseded_steps)

    async def end(self) -> RunRecord:
        """Learner and worker end by themselves; then the ledger is asked to."""
        async with asyncio.timeout(END_S):
            for name in ("learner", "worker"):
                assert await self._running[name].wait() == 0, self.said(name)
            self._running["ledger"].terminate()
            assert await self._running["ledger"].wait() == 0, self.said("ledger")
        return read_run(self.folder / "learner" / "metrics.jsonl")

    async def until_installed(self, step: int) -> None:
        """Wait until the peer's newest folder is of this step or a later one."""
        latest = self.folder / "rollout" / "latest"
        await self._until(lambda: latest.exists() and int(latest.resolve().name.removeprefix("step_")) >= step)

    async def until_file(self, file: Path) -> None:
        await self._until(file.exists)

    def url(self, name: str) -> str:
        """Of a daemon's HTTP server."""
        return str(json.loads((self.folder / name / "daemon.json").read_text())["http"])

    async def _until(self, found: Callable[[], Any]) -> Any:
        def check() -> None:
            for name, process in self._running.items():
                over = name in ("worker", "learner") and process.returncode == 0  # with the run
                assert over or process.returncode is None, f"{name} ended: {self.said(name)}"
            if self._following is not None and self._following.done():
                self._following.result()

        return await until(found, check=check)

    def said(self, name: str) -> str:
        """The end of what the part has written."""
        return (self.folder / f"{name}.log").read_text()[-3000:]

    async def stop(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for name in self._running:
            print(f"--- {name}\n{self.said(name)}")
        if self._following is not None:
            self._following.cancel()
        await self.engine.stop()


@contextlib.asynccontextmanager
async def started(
    folder: Path,
    steps: int,
    database: str | None = None,
    files: Mapping[str, bytes] | None = None,
    base_seed: int = 1,
) -> AsyncIterator[LearnerRun]:
    run = LearnerRun(folder, steps, database, files, base_seed)
    try:
        await run.begin()
        yield run
    finally:
        await run.stop()
