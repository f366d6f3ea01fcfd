"""``p2pcast bench ledger``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from p2pcast.cli.options import console, documented, written
from p2pcast.daemon import event_loop
from p2pcast.errors import LocalError


@click.command()
@click.option("--seconds", type=click.FloatRange(1.0), default=20.0, help="Time of each measurement in seconds.")
@click.option("--clients", type=click.IntRange(1), default=16, help="Number of workers under full load.")
@click.option("--workers", type=click.IntRange(1), default=1000, help="Number of paced workers.")
@click.option(
    "--rate", type=click.FloatRange(1.0), default=250.0, help="Results per second of all paced workers together."
)
@click.option(
    "--database",
    metavar="URL",
    help="PostgreSQL database; each measurement has a schema of its own.  [default: SQLite in a new folder]",
)
@documented
def ledger(
    seconds: float,
    clients: int,
    workers: int,
    rate: float,
    database: str | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure a ledger under simulated workers over real HTTP, with results of 1024 tokens. Measured are results a
    second under full load, in requests of 32, and times of requests with many paced workers, in requests of 8. Beside
    it, results a second that one thread writes to the same disk without any rules.
    """
    from netem.rollouts import ledger_load

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder:
        document = _measured(ledger_load, Path(folder), seconds, clients, workers, rate, database)
    if written(document, output, as_json=as_json):
        return
    table = Table("load", "results/s", "lease p50 ms", "p99", "results p50 ms", "p99", "heartbeat p50 ms", "p99")
    for row in document["rows"]:
        times = [f"{row[name]:.0f}" for name in TIMES]
        table.add_row(row["load"], f"{row['results_s']:.0f}", *times)
    console().print(table)
    click.echo(
        f"One thread without rules writes {document['limit_results_s']:.0f} results/s; "
        f"{document['disk_bytes'] / 1e6:.0f} MB in the state folder, "
        f"{document['resident_bytes'] / 1e6:.0f} MB of memory"
    )


TIMES = ("lease_p50_ms", "lease_p99_ms", "results_p50_ms", "results_p99_ms", "heartbeat_p50_ms", "heartbeat_p99_ms")


def _measured(
    load: Any, folder: Path, seconds: float, clients: int, workers: int, rate: float, database: str | None
) -> dict[str, Any]:
    limit = load.write_limit(folder / "limit", min(5.0, seconds))
    state = folder / "full"
    with load.schema(database) as tables, load.ledger(state, tables, load.BATCH_GROUPS) as (url, process):
        trainer = _trainer(load, url, state)
        full = event_loop.run(load.full_load(url, state, trainer, clients, seconds))
        _raise_failure(trainer)
        sizes = {"disk_bytes": load.disk_bytes(state), "resident_bytes": load.resident_bytes(process)}
    rows, state = [_row(f"{clients} workers, full load", full, full.accepted / seconds)], folder / "paced"
    batch_groups = min(load.MOST_BATCH_GROUPS, workers * load.PACED_SLOTS)
    with load.schema(database) as tables, load.ledger(state, tables, batch_groups) as (url, _):
        trainer = _trainer(load, url, state)
        paced, paced_s = event_loop.run(load.paced_load(url, state, trainer, workers, rate, seconds))
        _raise_failure(trainer)
        rows.append(_row(f"{workers} workers, {rate:g} results/s", paced, paced_s))
    return {"limit_results_s": limit, "rows": rows} | sizes


def _trainer(load: Any, url: str, state: Path) -> Any:
    found = load.Trainer(url, state / "http.token")
    found.start()
    return found


def _raise_failure(trainer: Any) -> None:
    if trainer.failure is not None:
        raise LocalError(f"the trainer failed: {trainer.failure}")


def _row(name: str, found: Any, results_s: float) -> dict[str, Any]:
    import numpy as np

    def ms(times: list[float], share: float) -> float:
        return float(np.percentile(times, share) * 1e3) if times else 0.0

    values = [ms(times, p) for times in (found.lease_s, found.results_s, found.heartbeat_s) for p in (50, 99)]
    return {"load": name, "results_s": results_s, "rejected": found.rejected, **dict(zip(TIMES, values, strict=True))}
