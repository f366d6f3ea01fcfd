"""``p2pcast bench ledger`` and ``plays``: a ledger, and its workers' processes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written
from p2pcast.ground.errors import LocalError
from p2pcast.process import event_loop

SQLITE, POSTGRESQL = "SQLite", "PostgreSQL"


@click.command()
@click.option("--seconds", type=click.FloatRange(1.0), default=20.0, help="Time of each measurement in seconds.")
@click.option("--clients", type=click.IntRange(1), default=16, help="Number of workers under full load.")
@click.option("--workers", type=click.IntRange(1), default=1000, help="Number of paced workers.")
@click.option(
    "--rate",
    type=click.FloatRange(1.0),
    help="Results per second of all paced workers together.  [default: half of those under full load]",
)
@click.option(
    "--database",
    metavar="URL",
    help="PostgreSQL database; each measurement has a schema of its own.  [default: SQLite in a new folder]",
)
@click.option("--postgresql", is_flag=True, help="A PostgreSQL server of the measurement's own, besides SQLite.")
@click.option("--growth", type=click.IntRange(0), default=0, help="Number of results in whose course growth is shown.")
@documented
def ledger(
    seconds: float,
    clients: int,
    workers: int,
    rate: float | None,
    database: str | None,
    postgresql: bool,
    growth: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure a ledger under simulated workers over real HTTP, with results of 1024 tokens. Measured are results a
    second under full load, in requests of 32, and times of requests with many paced workers, in requests of 8. Beside
    it, results a second that one thread writes to the same disk without any rules. With --growth, rows, bytes and CPU
    time in the course of many results.
    """
    from netem.fleet import postgresql_server
    from netem.rollouts import ledger_load

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder, ExitStack() as stack:
        urls: dict[str, str | None] = {SQLITE: None} if database is None else {POSTGRESQL: database}
        if postgresql:
            urls[POSTGRESQL] = stack.enter_context(postgresql_server.server())
        document = _measured(ledger_load, Path(folder), seconds, clients, workers, rate, urls, growth)
    if written(document, output, as_json=as_json):
        return
    heads = ("lease p50 ms", "p99", "results p50 ms", "p99", "heartbeat p50 ms", "p99")
    table = Table("database", "load", "results/s", *heads)
    for row in document["rows"]:
        times = [f"{row[name]:.0f}" for name in TIMES]
        table.add_row(row["database"], row["load"], f"{row['results_s']:.0f}", *times)
    console().print(table)
    click.echo(f"One thread without rules writes {document['limit_results_s']:.0f} results/s to this disk.")
    if document["growth"]:
        table = Table(
            "database", "results", "rows", "database MB", "results' MB", "memory MB", "CPU ms", "lease p99 ms"
        )
        for row in document["growth"]:
            sizes = [f"{row[name] / 1e6:.1f}" for name in ("database_bytes", "body_bytes", "resident_bytes")]
            counts = [f"{row[name]:.0f}" for name in ("results", "rows")]
            table.add_row(row["database"], *counts, *sizes, f"{row['cpu_ms']:.2f}", f"{row['lease_p99_ms']:.0f}")
        console().print(table)


TIMES = ("lease_p50_ms", "lease_p99_ms", "results_p50_ms", "results_p99_ms", "heartbeat_p50_ms", "heartbeat_p99_ms")
SIZES = 4
"""Looks at a ledger that grows: few, so that the ledger forgets old batches before each of them."""


def _measured(
    load: Any,
    folder: Path,
    seconds: float,
    clients: int,
    workers: int,
    rate: float | None,
    urls: Mapping[str, str | None],
    growth: int,
) -> dict[str, Any]:
    limit = load.write_limit(folder / "limit", min(5.0, seconds))
    rows, grown = [], []
    for name, database in urls.items():
        state = folder / f"full {name}"
        with load.schema(database) as tables, load.ledger(state, tables, load.BATCH_GROUPS) as (url, process):
            trainer = _trainer(load, url, state)
            full = event_loop.run(load.full_load(url, state, trainer, clients, seconds))
            _raise_failure(trainer)
            sizes = {"disk_bytes": load.disk_bytes(state), "resident_bytes": load.resident_bytes(process)}
        full_s = full.accepted / full.took_s
        rows.append(_row(name, f"{clients} workers, full load", full, full_s) | sizes)
        state, paced_rate = folder / f"paced {name}", rate or max(1.0, full_s / 2)
        batch_groups = min(load.MOST_BATCH_GROUPS, workers * load.PACED_SLOTS)
        with load.schema(database) as tables, load.ledger(state, tables, batch_groups) as (url, process):
            trainer = _trainer(load, url, state)
            paced, paced_s = event_loop.run(load.paced_load(url, state, trainer, workers, paced_rate, seconds))
            _raise_failure(trainer)
            sizes = {"disk_bytes": load.disk_bytes(state), "resident_bytes": load.resident_bytes(process)}
        rows.append(_row(name, f"{workers} workers, {paced_rate:.0f} results/s", paced, paced_s) | sizes)
        if growth:
            grown += _grown(load, folder / f"growth {name}", name, database, clients, growth)
    return {"limit_results_s": limit, "workers": workers, "clients": clients, "rows": rows, "growth": grown}


def _grown(load: Any, state: Path, name: str, database: str | None, clients: int, results: int) -> list[dict[str, Any]]:
    with load.schema(database) as tables, load.ledger(state, tables, load.GROWTH_BATCH_GROUPS) as (url, process):
        trainer = _trainer(load, url, state)
        sizes = event_loop.run(load.growing_load(url, state, tables, process, trainer, clients, results, SIZES))
        _raise_failure(trainer)
    return [{"database": name, **asdict(size)} for size in sizes]


def _trainer(load: Any, url: str, state: Path) -> Any:
    found = load.Trainer(url, state / "http.token")
    found.start()
    return found


def _raise_failure(trainer: Any) -> None:
    if trainer.failure is not None:
        raise LocalError(f"the trainer failed: {trainer.failure}")


def _row(database: str, name: str, found: Any, results_s: float) -> dict[str, Any]:
    import numpy as np

    def ms(times: list[float], share: float) -> float:
        return float(np.percentile(times, share) * 1e3) if times else 0.0

    values = [ms(times, p) for times in (found.lease_s, found.results_s, found.heartbeat_s) for p in (50, 99)]
    about = {"database": database, "load": name, "results_s": results_s, "rejected": found.rejected}
    return about | dict(zip(TIMES, values, strict=True))


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=9, help="Number of measurements of each way.")
@documented
def plays(rounds: int, as_json: bool, output: Path | None) -> None:
    """Measure a turn of a play in a process of its own, beside the same turn in the worker's process. The engine
    answers at once.
    """
    from netem.bench.play_cost import bench_plays

    rows = [bench_plays(tokens, at_once, rounds) for tokens in (1024, 32768) for at_once in (1, 32)]
    if written({"rows": rows}, output, as_json=as_json):
        return
    table = Table("prompt", "plays at once", "here, ms a turn", "in a process", "ratio", "CPU of the worker, ms")
    for row in rows:
        here, pool = row["here"], row["pool"]
        cells = (here["turn_ms"], pool["turn_ms"], pool["turn_ms"] / here["turn_ms"], pool["worker_cpu_ms"])
        table.add_row(str(row["prompt_tokens"]), str(row["at_once"]), *(f"{cell:.2f}" for cell in cells))
    console().print(table)
