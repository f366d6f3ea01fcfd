"""A worker's process is cut off from the ledger for longer than its leases, and then comes back. Its jobs were done
elsewhere, or wait for it. Its late results are judged by the rules.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ledger_stage import END_S, Up, config_of
from parity_task import NAME
from test_ledger_daemon import client_of

from p2pcast.ground.version import Version
from tests.support.fake_engine import FakeEngine, digest_of
from tests.support.until import until
from trainer_node.ledger_server.ledger_daemon import LedgerConfig

SLOTS = 8
GUESS_S = 600.0
"""Leases outlast any standstill of this machine, until the ledger's clock leaps."""


class Proxy:
    """Forwards TCP connections to a port of this machine, except while it is cut: bytes then wait, and nothing ends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connected = asyncio.Event()
        self._connected.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._connected.clear()

    def mend(self) -> None:
        self._connected.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for pair in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(*pair))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                await self._connected.wait()
                writer.write(chunk)
                await writer.drain()
            await self._connected.wait()
        except OSError:
            pass
        finally:
            writer.close()

    async def stop(self) -> None:
        self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


@asynccontextmanager
async def worker(folder: Path, name: str, port: int, engine: FakeEngine) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["-m", "p2pcast.cli", "work", f"127.0.0.1:{port}", "--task", NAME, "--name", name, "--slots", str(SLOTS)]
    words += ["--bearer-file", str(folder / "worker.token"), "--engine", engine.url]
    words += ["--peer", engine.url.removeprefix("http://"), "--drain", "0"]
    log = folder / f"{name}.log"
    with open(log, "ab") as file:  # noqa: ASYNC230 - a local file
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        print(f"--- {log.name}\n{log.read_text()[-3000:]}")


def config(folder: Path, rule: str) -> LedgerConfig:
    """Batches are so large that the learner takes none, and no job is cancelled."""
    made = config_of(folder, batch_groups=64)
    return dataclasses.replace(made, policy=dataclasses.replace(made.policy, rule=rule, guess_s=GUESS_S))  # type: ignore[arg-type]


def rows(folder: Path, query: str, *terms: Any) -> list[Any]:
    database = sqlite3.connect(f"file:{folder / 'ledger.db'}?mode=ro", uri=True)
    try:
        return database.execute(query, terms).fetchall()
    finally:
        database.close()


@pytest.mark.parametrize(
    ("rule", "elsewhere", "reasons"),
    [
        ("bounded", True, {"duplicate"}),
        ("bounded", False, {None}),
        ("strict", False, {"late"}),
    ],
)
async def test_late_results_are_judged_by_the_rules(
    tmp_path: Path, up: Up, engine: FakeEngine, rule: str, elsewhere: bool, reasons: set[str | None]
) -> None:
    engine.versions = ["0.0"]
    other = FakeEngine(versions=["0.0"])
    await other.start()
    engine.gate.clear()
    async with asyncio.timeout(END_S), up(config(tmp_path, rule)) as daemon:
        proxy = Proxy(daemon.http.address[1])
        await proxy.start()
        learner = client_of(daemon, tmp_path)
        await asyncio.to_thread(learner.resume, 0, 0)
        await asyncio.to_thread(learner.publish, Version(0, 0), bytes.fromhex(digest_of("0.0")))
        async with worker(tmp_path, "cut", proxy.port, engine) as process:
            await engine.until_running(SLOTS)
            held = rows(tmp_path, "SELECT id, job_id FROM leases")
            assert len(held) == SLOTS
            proxy.cut()
            engine.gate.set()  # the plays end, and their results do not arrive
            transitions = daemon._ledger._transitions
            with transitions._clock_turn:
                transitions._clock._ran_s += GUESS_S

            def states(table: str, column: str, ids: list[Any]) -> Counter[str]:
                marks = ", ".join("?" * len(ids))
                return Counter(dict(rows(
                    tmp_path, f"SELECT {column}, count(*) FROM {table} WHERE id IN ({marks}) GROUP BY 1", *ids
                )))  # fmt: skip

            await until(lambda: states("leases", "state", [lease for lease, _ in held]) == {"expired": SLOTS})
            jobs = [job for _, job in held]
            if elsewhere:
                async with worker(tmp_path, "other", daemon.http.address[1], other):
                    await until(lambda: states("jobs", "state", jobs) == {"accepted": SLOTS})
            else:
                assert states("jobs", "state", jobs) == {"open": SLOTS}
            proxy.mend()
            query = "SELECT reason FROM results WHERE lease_id = ?"
            await until(lambda: all(rows(tmp_path, query, lease) for lease, _ in held))
            assert {rows(tmp_path, query, lease)[0][0] for lease, _ in held} == reasons
            # The worker goes on, and is not blamed.
            (count,) = rows(tmp_path, "SELECT count(*) FROM leases")[0]
            await until(lambda: rows(tmp_path, "SELECT count(*) FROM leases")[0][0] > count)
            assert process.returncode is None
            assert rows(tmp_path, "SELECT max(blamed) FROM workers") == [(0,)]
        await proxy.stop()
    await other.stop()
    twice = "SELECT job_id FROM results WHERE verdict = 'accepted' GROUP BY job_id HAVING count(*) > 1"
    assert rows(tmp_path, twice) == []
    if elsewhere:
        query = """
            SELECT DISTINCT workers.name FROM results JOIN leases ON leases.id = lease_id
            JOIN workers ON workers.id = worker_id WHERE verdict = 'accepted' AND results.job_id = ?
        """
        assert {rows(tmp_path, query, job)[0][0] for job in jobs} == {"other"}
