"""Load on a ledger: simulated workers over real HTTP, with results of about a thousand tokens.

Four figures. *Sustained*: results a second with as many requests as the ledger takes. *Paced*: times of requests with
many workers, each of which holds leases and sends heartbeats. Batches are so large that no worker waits for its share
or for a version: the times are the ledger's. *Limit*: results a second that one thread writes to the same file system
in the same form, a commit for each request, with no rules at all. *Growth*: rows, bytes, memory and CPU time in the
course of many results, with batches that retention forgets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from sqlalchemy import create_engine, func, make_url, select, text
from sqlalchemy.exc import ArgumentError, DBAPIError

from netem.rollouts.long_answers import NAME, TOKENS, LongAnswers
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api import worker_api as api
from p2pcast.ledger_api.batch_client import BatchClient
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result, Span
from rollout_node.worker.ledger_client import LedgerClient
from trainer_node.ledger.database import ledger_schema
from trainer_node.ledger_server.callers import WORKER_FILE

BATCH_GROUPS, GROUP_SIZE = 512, 8
MOST_BATCH_GROUPS = 65536
GROWTH_BATCH_GROUPS = 32
"""Retention keeps 16 batches: few enough to be forgotten in the course of a measurement."""
AT_ONCE = 32
"""Leases and results of one request under full load."""
PACED_SLOTS = 8
"""Leases and results of one request of a paced worker."""
START_S = 60.0
LIMIT_S = 90.0
"""For results under full load, in seconds."""
MANIFEST = bytes(32)


@dataclass(slots=True)
class LoadResult:
    """Seconds of each request, accepted results, and the seconds until the last of them."""

    lease_s: list[float] = field(default_factory=list)
    results_s: list[float] = field(default_factory=list)
    heartbeat_s: list[float] = field(default_factory=list)
    accepted: int = 0
    took_s: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)


def result_of(lease: bytes, job: Job, drawn: np.random.Generator) -> Result:
    prompt = len(job.prompt)
    count = prompt + TOKENS
    mask = np.ones(count, np.uint8)
    mask[:prompt] = 0
    tokens = drawn.integers(0, LongAnswers.vocabulary, count, dtype=np.uint32)
    tokens[:prompt] = np.frombuffer(job.prompt, np.uint8)
    logprobs = -drawn.random(count, dtype=np.float32)
    logprobs[:prompt] = 0
    return Result(
        job=job.job,
        lease=lease,
        task_hash=job.task_hash,
        token_ids=tokens,
        mask=mask,
        logprobs=logprobs,
        spans=(Span(job.oldest, prompt, count, MANIFEST, "recompute"),),
        temperature=job.temperature,
        reward=0.0,
        stop="length",
    )


class Worker:
    """One simulated worker. ``served``: text of the version that its engine serves."""

    def __init__(self, http: aiohttp.ClientSession, url: str, bearer: str, name: str, slots: int) -> None:
        self._ledger, self._name, self._slots = LedgerClient(http, url, bearer), name, slots
        self._session = b""
        self._heartbeat_s = 1.0
        self._drawn = np.random.default_rng(abs(hash(name)))

    async def register(self) -> None:
        task = LongAnswers()
        kind = api.DeviceClasses(self._name.partition("-")[0])  # each load has lease times of its own
        about = api.Registration(self._name, self._slots, task.name, task.hash, classes=kind)
        answer = await self._ledger.ask_once(api.REGISTER, about)
        self._session = answer.session
        self._take_interval(answer.heartbeat_s)

    def _take_interval(self, interval_s: float | None) -> None:
        assert interval_s is not None
        self._heartbeat_s = interval_s

    async def lease(self, found: LoadResult, served: str, wait_s: float) -> list[tuple[bytes, Job]]:
        asked = api.LeaseRequest(self._session, served, MANIFEST, self._slots, wait_s=wait_s)
        began = time.perf_counter()
        answer = await self._ledger.ask_once(api.LEASE, asked, wait_s)
        if answer.leases:
            found.lease_s.append(time.perf_counter() - began)
        return [(row.lease, Job.from_bytes(row.job)) for row in answer.leases]

    async def play(self, found: LoadResult, leases: list[tuple[bytes, Job]], seconds: float) -> None:
        """Tokens that come evenly, with heartbeats."""
        until_s, tokens = time.perf_counter() + seconds, 0
        while (left_s := until_s - time.perf_counter()) > 0:
            await asyncio.sleep(min(left_s, self._heartbeat_s))
            tokens += 1
            began = time.perf_counter()
            rows = [api.LeaseTokens(lease, tokens) for lease, _ in leases]
            answer = await self._ledger.ask_once(api.HEARTBEAT, api.HeartbeatRequest(self._session, rows))
            self._take_interval(answer.heartbeat_s)
            found.heartbeat_s.append(time.perf_counter() - began)

    async def hand_in(self, found: LoadResult, leases: list[tuple[bytes, Job]], served: str) -> None:
        made = [result_of(lease, job, self._drawn) for lease, job in leases]
        version = Version.parse(served)
        for result in made:
            object.__setattr__(result, "spans", (result.spans[0]._replace(version=version),))
        asked = api.ResultsRequest(bytes(self._session), [result.to_bytes() for result in made])
        began = time.perf_counter()
        answer = await self._ledger.ask_once(api.RESULTS, asked, LIMIT_S)
        found.results_s.append(time.perf_counter() - began)
        for row in answer.results:
            if row.accepted:
                found.accepted += 1
            else:
                reason = str(row.reason)
                found.rejected[reason] = found.rejected.get(reason, 0) + 1


class Trainer(threading.Thread):
    """Takes every batch, applies it at once, and publishes the next version."""

    def __init__(self, url: str, bearer_file: Path) -> None:
        super().__init__(name="trainer", daemon=True)
        self._client = BatchClient(url, bearer_file=bearer_file)
        self.step = 0
        self.failure: BaseException | None = None
        self._client.resume(0, 0)
        self._client.publish(Version(0, 0), MANIFEST)

    @property
    def served(self) -> str:
        return f"0.{self.step}"

    def run(self) -> None:
        try:
            while (batch := self._client.take(self.step)) is not None:
                step = self.step + 1
                self._client.applied(batch, step)
                self._client.publish(Version(0, step), MANIFEST)
                self._client.ack(step, [batch.id], bytes(32))
                self.step = step
        except BaseException as error:  # noqa: BLE001 - the measurement raises it
            self.failure = error


@contextlib.contextmanager
def ledger(folder: Path, database: str | None, batch_groups: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The ledger's URL and process. ``database``: URL; None: SQLite in the folder."""
    words = ["ledger", "--task", NAME, "--http", "127.0.0.1:0", "--state", str(folder)]
    words += ["--batch-groups", str(batch_groups), "--group-size", str(GROUP_SIZE)]
    words += [] if database is None else ["--database", database]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen([sys.executable, "-P", "-m", "p2pcast.cli", *words], stdout=log, stderr=log)
    try:
        yield _address(folder, process), process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def schema(database: str | None) -> Iterator[str | None]:
    """URL of a new schema in a PostgreSQL database, which is dropped at the end; None for None."""
    if database is None:
        yield None
        return
    name = f"p2pcast_bench_{os.urandom(4).hex()}"
    url = make_url(database).set(drivername="postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as conn:
            conn.execute(text(f"CREATE SCHEMA {name}"))
            try:
                inside = url.set(drivername="postgresql").update_query_dict({"options": f"-csearch_path={name}"})
                yield inside.render_as_string(hide_password=False)
            finally:
                conn.execute(text(f"DROP SCHEMA {name} CASCADE"))
    except (DBAPIError, ArgumentError) as error:
        raise UsageError(f"--database: {getattr(error, 'orig', error)}") from None
    finally:
        engine.dispose()


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    until_s = time.monotonic() + START_S
    while not (folder / "daemon.json").exists():
        if process.poll() is not None or time.monotonic() > until_s:
            raise LocalError(f"the ledger did not start:\n{folder.with_suffix('.log').read_text()[-2000:]}")
        time.sleep(0.05)
    return str(json.loads((folder / "daemon.json").read_text())["http"])


@contextlib.asynccontextmanager
async def workers(url: str, folder: Path, count: int, slots: int) -> AsyncIterator[list[Worker]]:
    """Registered workers, with a connection each."""
    bearer = (folder / WORKER_FILE).read_text().strip()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        made = [Worker(http, url, bearer, f"{slots}-{number}", slots) for number in range(count)]
        for first in range(0, count, AT_ONCE):
            await asyncio.gather(*(one.register() for one in made[first : first + AT_ONCE]))
        yield made


async def full_load(url: str, folder: Path, trainer: Trainer, count: int, seconds: float) -> LoadResult:
    """Workers that hand results in as soon as they have leased. The first results are not counted: the process that
    computes rewards starts with them. Begun requests end after ``seconds``.
    """
    found = LoadResult()
    async with workers(url, folder, count, AT_ONCE) as made:

        async def play(one: Worker, into: LoadResult) -> None:
            served = trainer.served
            if leases := await one.lease(into, served, 1.0):
                await one.hand_in(into, leases, served)

        async def work(one: Worker, until_s: float) -> None:
            while time.perf_counter() < until_s and trainer.failure is None:
                await play(one, found)

        await asyncio.gather(*(play(one, LoadResult()) for one in made))
        began = time.perf_counter()
        await asyncio.gather(*(work(one, began + seconds) for one in made))
        found.took_s = time.perf_counter() - began
    return found


@dataclass(frozen=True, slots=True)
class Size:
    """A ledger after ``results`` accepted results. ``cpu_ms``: of the ledger for each result since the size before.
    ``lease_p99_ms``: since then.
    """

    results: int
    rows: int
    database_bytes: int
    body_bytes: int
    resident_bytes: int
    cpu_ms: float
    lease_p99_ms: float


async def growing_load(
    url: str, folder: Path, database: str | None, process: subprocess.Popen[bytes], trainer: Trainer, count: int,
    results: int, sizes: int,
) -> list[Size]:  # fmt: skip
    """``sizes`` looks at the ledger, evenly over ``results`` results of ``count`` workers that never rest."""
    found, made = LoadResult(), list[Size]()
    async with workers(url, folder, count, AT_ONCE) as crowd:
        for number in range(sizes):
            began, before = found.accepted, cpu_s(process)
            wanted = max(began + 1, results * (number + 1) // sizes)
            found.lease_s.clear()

            async def work(one: Worker, wanted: int) -> None:
                while found.accepted < wanted and trainer.failure is None:
                    served = trainer.served
                    if leases := await one.lease(found, served, 1.0):
                        await one.hand_in(found, leases, served)

            await asyncio.gather(*(work(one, wanted) for one in crowd))
            if trainer.failure is not None:
                break
            counted, bytes_used = await asyncio.to_thread(rows_of, folder, database)
            cpu_ms = (cpu_s(process) - before) / (found.accepted - began) * 1e3
            p99_ms = float(np.percentile(found.lease_s, 99) * 1e3)
            bodies = disk_bytes(folder / "bodies")
            made.append(Size(found.accepted, counted, bytes_used, bodies, resident_bytes(process), cpu_ms, p99_ms))
    return made


def rows_of(folder: Path, database: str | None) -> tuple[int, int]:
    """Rows of all tables, and bytes of the database."""
    url = f"sqlite:///file:{folder / 'ledger.db'}?mode=ro&uri=true" if database is None else database
    engine = create_engine(make_url(url).set(drivername="sqlite" if database is None else "postgresql+psycopg"))
    try:
        with engine.connect() as conn:
            tables = ledger_schema.metadata.sorted_tables
            rows = sum(int(conn.scalar(select(func.count()).select_from(table)) or 0) for table in tables)
            if database is None:
                return rows, sum(path.stat().st_size for path in folder.glob("ledger.db*"))
            sizes = (conn.scalar(select(func.pg_total_relation_size(table.name))) for table in tables)
            return rows, sum(int(size or 0) for size in sizes)
    finally:
        engine.dispose()


async def paced_load(
    url: str, folder: Path, trainer: Trainer, count: int, rate: float, seconds: float
) -> tuple[LoadResult, float]:
    """``count`` workers that together hand in ``rate`` results a second, and send heartbeats. Returns their rate, too.
    The first plays are not counted: the workers begin one after the other.
    """
    ramp, found = LoadResult(), LoadResult()
    play_s = count * PACED_SLOTS / rate
    async with workers(url, folder, count, PACED_SLOTS) as made:
        began = time.perf_counter()
        steady_s, until_s = began + play_s, began + play_s + seconds

        async def work(number: int, one: Worker) -> None:
            await asyncio.sleep(play_s * number / count)
            while (turn := time.perf_counter()) < until_s and trainer.failure is None:
                into, served = (found if turn >= steady_s else ramp), trainer.served
                if leases := await one.lease(into, served, 5.0):
                    await one.play(into, leases, max(0.0, play_s - (time.perf_counter() - turn)))
                    await one.hand_in(into, leases, served)

        await asyncio.gather(*(work(number, one) for number, one in enumerate(made)))
        return found, found.accepted / seconds


def write_limit(folder: Path, seconds: float) -> float:
    """Results a second that one thread writes: body appended and synced, row inserted, a commit for each request."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(1)
    job = Job(
        id=bytes(16), size=1, purpose="train", task="t", task_hash=bytes(32), prompt=b"\x01", seed=0, temperature=1.0,
        max_tokens=TOKENS, job=bytes(16), index=0, oldest=Version(0, 0),
    )  # fmt: skip
    body = result_of(bytes(16), job, drawn).to_bytes()
    conn = sqlite3.connect(folder / "limit.db", isolation_level=None)
    conn.execute("PRAGMA journal_mode=WAL")
    conn.execute("PRAGMA synchronous=FULL")
    conn.execute("CREATE TABLE results (job BLOB PRIMARY KEY, place INTEGER, reward REAL)")
    count, began = 0, time.perf_counter()
    with open(folder / "limit.seg", "wb") as file:
        while time.perf_counter() - began < seconds:
            conn.execute("BEGIN IMMEDIATE")
            for _ in range(AT_ONCE):
                file.write(body)
                conn.execute("INSERT INTO results VALUES (?, ?, 1.0)", (count.to_bytes(16, "big"), file.tell()))
                count += 1
            file.flush()
            os.fsync(file.fileno())
            conn.execute("COMMIT")
    conn.close()
    return count / (time.perf_counter() - began)


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
