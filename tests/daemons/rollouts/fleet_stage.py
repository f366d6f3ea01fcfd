"""Real processes around a fleet: a ledger, `p2pcast fleet run`, and workers that its provider's commands start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
from parity_task import NAME

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient
from tests.support.fake_engine import FakeEngine, digest_of
from tests.support.until import until
from trainer_node.ledger_server.callers import WORKER_FILE

ROOT = Path(__file__).parents[3]
END_S = 600.0
SLOTS = 4

START = """#!/bin/sh
{command} --name "$P2PCAST_WORKER" > "{folder}/$P2PCAST_WORKER.log" 2>&1 &
echo $! > "{folder}/$P2PCAST_WORKER.part"
mv "{folder}/$P2PCAST_WORKER.part" "{folder}/$P2PCAST_WORKER.pid"
echo "$P2PCAST_WORKER" >> {folder}/started
"""
STOP = """#!/bin/sh
kill -9 "$(cat "{folder}/$P2PCAST_WORKER.pid")"
rm "{folder}/$P2PCAST_WORKER.pid"
echo "$P2PCAST_WORKER" >> {folder}/stopped
"""
"""SIGKILL: a lease that the worker still held would be lost."""
LIST = """#!/bin/sh
echo look >> {folder}/looks
cd {folder}
for file in {kind}-*.pid; do [ -e "$file" ] && echo "${{file%.pid}}"; done
true
"""


class FleetStage:
    """``engine``: serves every worker. Files ``started``, ``stopped`` and ``looks`` have a line for each command.

    ``started`` and ``stopped`` get it at the command's end: a test may end the operator then, and with it a command.
    """

    def __init__(self, folder: Path, engine: FakeEngine) -> None:
        self.folder, self.state, self.engine = folder, folder / "ledger", engine
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._providers: dict[str, str] = {}
        self.url = ""

    # -- processes

    async def begin(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:  # noqa: ASYNC230 - a small file
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "p2pcast.cli", *words, cwd=ROOT, stdout=log, stderr=log
            )
        self._processes[name] = process

    async def ledger(self, *more: str) -> None:
        shape = ("--batch-groups", "2", "--group-size", "4", "--staleness", "6")
        where = ("--task", NAME, "--http", "127.0.0.1:0", "--state", str(self.state))
        await self.begin("ledger", "ledger", *where, *shape, *more)
        await self.until(lambda: (self.state / "daemon.json").exists(), "the ledger answers")
        self.url = json.loads((self.state / "daemon.json").read_text())["http"]

    def provider(self, kind: str, start: str | None = None) -> str:
        """An exec provider of `p2pcast work`. ``start``: another start script."""
        address = self.engine.url.removeprefix("http://")
        work = (
            f"{sys.executable} -m p2pcast.cli work {self.url} --engine {self.engine.url} --peer {address} "
            f"--task {NAME} --bearer-file {self.state / WORKER_FILE} --slots {SLOTS}"
        )
        files = []
        for name, text in (("start", start or START), ("stop", STOP), ("list", LIST)):
            files.append(self.folder / f"{kind}-{name}.sh")
            files[-1].write_text(text.format(folder=self.folder, command=work, kind=kind))
            files[-1].chmod(0o700)
        return f"{kind}=exec:" + " -- ".join(map(str, files))

    async def operator(self, name: str, least: int, offers: dict[str, str], *more: str) -> None:
        """``offers``: USD_H:RATE:COUNT of each kind."""
        words = [word for kind, price in offers.items() for word in ("--price", f"{kind}={price}")]
        words += [word for kind in offers for word in ("--provider", self._providers[kind])]
        quick = ("--interval", "0.2", "--window", "1", "--state", str(self.state), "--least", str(least))
        await self.begin(name, "fleet", "run", *words, *quick, *more)

    def offer(self, *kinds: str, **starts: str) -> None:
        """``starts``: start scripts by kind, in place of the usual one."""
        self._providers = {kind: self.provider(kind, starts.get(kind)) for kind in kinds}

    async def ended(self, name: str, number: int | None = None) -> int:
        """The exit code of a process, after the signal or by itself."""
        process = self._processes.pop(name)
        if number is not None:
            process.send_signal(number)
        return await process.wait()

    async def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for file in self.folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        for file in sorted(self.folder.glob("*.log")):
            print(f"--- {file.name}\n{file.read_text()[-3000:]}")

    # -- looks

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        def check() -> None:
            for name, process in self._processes.items():
                assert process.returncode is None, f"{name} ended: {self.said(name)}"

        return await until(condition, what, check=check)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().split() if file.exists() else []

    async def looks(self, more: int) -> None:
        """Wait until the operator has looked so often at its providers."""
        wanted = len(self.lines("looks")) + more
        await self.until(lambda: len(self.lines("looks")) >= wanted, f"{wanted} looks")

    async def workers(self) -> dict[str, dict[str, Any]]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/status") as answer:
            return {row["name"]: row for row in (await answer.json())["workers"]}

    async def until_workers(self, condition: Callable[[dict[str, dict[str, Any]]], bool], what: str) -> None:
        await until(self.workers, what, holds=condition)

    def leases(self, worker: str) -> Counter[tuple[str, str | None]]:
        """State of each lease that the worker ever had, and the verdict on its result."""
        query = (
            "select leases.state, results.verdict from leases join workers on workers.id = leases.worker_id "
            "left join results on results.lease_id = leases.id where workers.name = ?"
        )
        with contextlib.closing(sqlite3.connect(f"file:{self.state}/ledger.db?mode=ro", uri=True)) as database:
            return Counter(database.execute(query, (worker,)).fetchall())

    # -- the learner

    def client(self) -> BatchClient:
        return BatchClient(self.url, bearer_file=self.state / "http.token", give_up_s=END_S)

    def publish(self, client: BatchClient, step: int) -> None:
        client.publish(Version(0, step), bytes.fromhex(digest_of(f"0.{step}")))
        self.engine.versions = [*(v for v in self.engine.versions if v != f"0.{step}"), f"0.{step}"]
        self.engine.tokens_a_version = 1  # the newest version from now on

    def learn(self, steps: int, train_s: float) -> None:
        """``train_s``: a learner's work of each step."""
        client = self.client()
        client.resume(0, 0)
        for step in range(steps):
            batch = client.take(step)
            assert batch is not None
            time.sleep(train_s)
            client.applied(batch, step + 1)
            self.publish(client, step + 1)


@contextlib.asynccontextmanager
async def staged(folder: Path, engine: FakeEngine) -> AsyncIterator[FleetStage]:
    stage = FleetStage(folder, engine)
    try:
        async with asyncio.timeout(END_S):
            yield stage
    finally:
        engine.gate.set()
        await stage.close()
