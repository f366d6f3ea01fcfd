"""Commands of ``p2pcast bench`` about hubs and ledgers: ``start``, ``page``, ``publish``, ``plan``, ``ledger`` and
``plays``.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from netem.bench.figures_text import Columns, filled
from netem.bench.rendering import Document, Measurement, command, table
from p2pcast.cli.options import RateParameter
from p2pcast.cli.settings import setting
from p2pcast.ground.errors import LocalError
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class StartMeasurement(Measurement):
    """Measure how soon a hub answers after its start and after kill -9, and how soon it ends after SIGTERM."""

    runs: int = setting(5, "Number of fresh starts, and of restarts.", 1)
    versions: int = setting(1000, "Number of versions stored before a kill.", 1, 1000)

    def measure(self) -> Document:
        from netem.bench.start_cost import bench_start

        return bench_start(self.runs, self.versions)

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("from", "from"),
            ("to", "to"),
            ("median, s", lambda row: f"{document['medians'][row['name']]:.2f}"),
            ("longest, s", lambda row: f"{max(document[row['name']]):.2f}"),
        ]
        again = f"restart after kill -9 with {self.versions} versions"
        rows = [
            {"from": "start", "to": "the first answer", "name": "listening_s"},
            {"from": "SIGTERM", "to": "end of the process", "name": "ended_s"},
            {"from": again, "to": "status of the newest version", "name": "back_s"},
        ]
        yield table(rows, columns, f"{self.runs} runs")


@dataclass(frozen=True, slots=True)
class PageMeasurement(Measurement):
    """Measure the cost of the run's page: CPU of the hub, bytes of a load, time to the first paint in Chromium."""

    peers: int = setting(1000, "Number of peers that the hub knows.", 1, 10_000)
    viewers: int = setting(20, "Number of open pages.", 1, 64)
    seconds: float = setting(20.0, "Length of each measurement, in seconds.", 1.0)

    def measure(self) -> Document:
        from netem.bench.page_cost import bench_page

        return bench_page(self.peers, self.viewers, self.seconds, shutil.which("chromium"))

    def shown(self, document: Document) -> Iterator[Table | str]:
        figures = {
            "CPU of the hub without viewers": f"{100 * document['idle_share']:.1f} % of a core",
            "CPU of the hub with viewers": f"{100 * document['viewed_share']:.1f} % of a core",
            "a picture, compressed": f"{document['picture_bytes'] / 1e3:.1f} kB",
        }
        for name, value in (document["chromium"] or {}).items():
            shown = f"{value / 1e3:.1f} kB" if name.endswith("bytes") else f"{value:.3f} s"
            figures[name.replace("_", " ")] = shown
        if document["chromium"] is None:
            figures["Chromium"] = "not installed: no load was measured"
        rows = [{"figure": name, "value": value} for name, value in figures.items()]
        title = f"{self.peers} peers, {self.viewers} viewers"
        yield table(rows, [("figure", "figure"), ("value", "value")], title)


@dataclass(frozen=True, slots=True)
class PublishMeasurement(Measurement):
    """Measure the time that publishing live tensors adds to a training step, beside a memcpy of the state."""

    mib: int = setting(512, "Size of the bf16 state in MiB.", 1)
    steps: int = setting(5, "Number of measured versions, after two warm-up versions.", 1)
    device: str | None = setting(
        None, "torch device, such as cuda:1 or cpu.  [default: the GPU if any, otherwise the CPU]"
    )
    previous: Literal["gpu", "pinned"] = setting(
        "gpu", "Where the publisher keeps its two states of a model on a GPU: there, or in pinned memory of the host."
    )

    def measure(self) -> Document:
        from netem.bench.publish_cost import bench_publish

        side = 2048 if self.mib >= 8 else 512
        return bench_publish(self.mib * MIB, self.steps, side=side, device=self.device, previous=self.previous)

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("tensors", "row"),
            ("changed", lambda row: f"{100 * row['changed'] / row['params']:.2f} %"),
            ("delta", "{bytes:MB .2f} MB"),
            ("memcpy", "{memcpy_s:ms .0f} ms"),
            ("publish() returns", "{publish_s:ms .0f} ms"),
            ("snapshot", "{snapshot_s:ms .0f} ms"),
            ("÷ memcpy", "{snapshot_to_memcpy:.2f}"),
            ("stored at the hub", "{total_s:ms .0f} ms"),
            ("÷ memcpy", "{total_to_memcpy:.2f}"),
        ]
        title = "{device}: {state_bytes:MiB .0f} MiB of bf16, median of {steps}"
        yield table(document["rows"], columns, filled(title, document))
        yield (
            "Snapshot: from the call of publish() until the optimiser may continue. Stored: until wait_durable() "
            "returns, with hub and publisher on the same cores."
        )


REPEATS = 5
SMALL_REGION = 5
"""Peers in each region, in the measurement with many regions."""
MIXED_BPS = (25e6, 50e6, 100e6, 200e6)


@dataclass(frozen=True, slots=True)
class PlanMeasurement(Measurement):
    """Measure the time of the hub's planning decisions for a large fleet. The decisions are a first plan, a new plan, a
    join, a death, and the joins of a whole fleet. Also plans with five peers to a region, of mixed rates.
    """

    peers: int = setting(10_000, "Number of peers.", 2)
    regions: int = setting(5, "Number of regions.", 1)
    uplink: float = setting(
        "30gbit", "Upload rate of the hub in bits per second; each peer has 100 Mbit/s.", type=RateParameter()
    )

    def measure(self) -> Document:
        rows = plan_times(self.peers, self.regions, self.uplink)
        return {"peers": self.peers, "regions": self.regions, "uplink_bps": self.uplink, "rows": rows}

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns = [("what", "what"), ("ms, best", "{best_s:ms .2f}"), ("ms, median", "{median_s:ms .2f}")]
        yield table(document["rows"], columns)


def plan_times(peers: int, regions: int, uplink_bps: float) -> list[dict[str, Any]]:
    from topology import PlanMember, admit, excise, make_plan
    from topology.broadcast_time import number_of_chains
    from topology.fallback_neighbours import affected_peers, neighbours_of
    from trainer_node.membership.membership import Membership
    from trainer_node.membership.peer_record import PeerRecord
    from trainer_node.membership.plan_distributor import BACKUPS

    members = [
        PlanMember(f"{i * 2654435761 % 2**64:016x}", f"r{i % regions}", 100e6, 50.0 + i % 50) for i in range(peers)
    ]
    first = make_plan(members, uplink_bps, epoch=(1, 1))
    chains = number_of_chains(uplink_bps, [100e6], peers)
    newcomer, dying = PlanMember("newcomer", "r0"), members[peers // 2].id

    rates = random.Random(0).choices(MIXED_BPS, k=2 * peers)
    many = f"{-(-peers // SMALL_REGION)} regions, mixed rates"
    mixed, changed = (
        [
            replace(m, region=f"r{i // SMALL_REGION}", bps=bps)
            for i, (m, bps) in enumerate(zip(members, some, strict=True))
        ]
        for some in (rates[:peers], rates[peers:])
    )
    entered = make_plan(mixed, uplink_bps, epoch=(1, 1))

    def join_all() -> None:
        fleet = Membership(1, uplink_bps)
        for m in members:
            fleet.join(PeerRecord(m.id, m.id, m.region, "", 0, 0.0), 0.0)

    after = excise(first, [dying], epoch=(1, 2))

    def find_affected() -> None:
        for peer in affected_peers(first, after, {dying, *first.children(dying)}):
            after.backups(peer, BACKUPS)
            neighbours_of(after, peer)

    return [
        _timed("plan from nothing", lambda: make_plan(members, uplink_bps, epoch=(1, 1))),
        _timed("plan anew", lambda: make_plan(members, uplink_bps, epoch=(1, 2), previous=first)),
        _timed(f"plan from nothing, {many}", lambda: make_plan(mixed, uplink_bps, epoch=(1, 1))),
        _timed(f"plan anew, {many}", lambda: make_plan(mixed, uplink_bps, epoch=(1, 2), previous=entered)),
        _timed(
            f"plan anew, {many} that all changed",
            lambda: make_plan(changed, uplink_bps, epoch=(1, 2), previous=entered),
        ),
        _timed("one joins", lambda: admit(first, newcomer, chains=chains, epoch=(1, 2))),
        _timed("one dies", lambda: excise(first, [dying], epoch=(1, 2))),
        _timed("the affected peers, and their new neighbours", find_affected),
        _timed("all join, one by one", join_all, 1),
    ]


def _timed(what: str, run: Callable[[], object], repeats: int = REPEATS) -> dict[str, Any]:
    took: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    took.sort()
    return {"what": what, "best_s": took[0], "median_s": took[len(took) // 2]}


SQLITE, POSTGRESQL = "SQLite", "PostgreSQL"
TIMES: Final = {
    "lease_p50_ms": "lease p50 ms",
    "lease_p99_ms": "p99",
    "results_p50_ms": "results p50 ms",
    "results_p99_ms": "p99",
    "heartbeat_p50_ms": "heartbeat p50 ms",
    "heartbeat_p99_ms": "p99",
}


@dataclass(frozen=True, slots=True)
class LedgerMeasurement(Measurement):
    """Measure a ledger under simulated workers over real HTTP, with results of 1024 tokens. Measured are results a
    second under full load, in requests of 32, and times of requests with many paced workers, in requests of 8. Beside
    it, results a second that one thread writes to the same disk without any rules. With --growth, rows, bytes and CPU
    time in the course of many results.
    """

    seconds: float = setting(20.0, "Time of each measurement in seconds.", 1.0)
    clients: int = setting(16, "Number of workers under full load.", 1)
    workers: int = setting(1000, "Number of paced workers.", 1)
    rate: float | None = setting(
        None, "Results per second of all paced workers together.  [default: half of those under full load]", 1.0
    )
    database: str | None = setting(
        None,
        "PostgreSQL database; each measurement has a schema of its own.  [default: SQLite in a new folder]",
        metavar="URL",
    )
    postgresql: bool = setting(False, "A PostgreSQL server of the measurement's own, besides SQLite.")
    growth: int = setting(0, "Number of results in whose course growth is shown.", 0)

    def measure(self) -> Document:
        from netem.fleet import postgresql_server
        from netem.rollouts import ledger_load

        with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder, ExitStack() as stack:
            urls: dict[str, str | None] = {SQLITE: None} if self.database is None else {POSTGRESQL: self.database}
            if self.postgresql:
                urls[POSTGRESQL] = stack.enter_context(postgresql_server.server())
            return _measured(
                ledger_load, Path(folder), self.seconds, self.clients, self.workers, self.rate, urls, self.growth
            )

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("database", "database"),
            ("load", "load"),
            ("results/s", "{results_s:.0f}"),
            *((head, f"{{{key}:.0f}}") for key, head in TIMES.items()),
        ]
        yield table(document["rows"], columns)
        yield filled("One thread without rules writes {limit_results_s:.0f} results/s to this disk.", document)
        if document["growth"]:
            columns = [
                ("database", "database"),
                ("results", "{results:.0f}"),
                ("rows", "{rows:.0f}"),
                ("database MB", "{database_bytes:MB .1f}"),
                ("results' MB", "{body_bytes:MB .1f}"),
                ("memory MB", "{resident_bytes:MB .1f}"),
                ("CPU ms", "{cpu_ms:.2f}"),
                ("lease p99 ms", "{lease_p99_ms:.0f}"),
            ]
            yield table(document["growth"], columns)


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

    if not found.lease_s:
        raise LocalError(f"{database}, {name}: no worker got a lease, so there is no time of leases; raise --seconds")

    def ms(times: list[float], share: float) -> float:
        return float(np.percentile(times, share) * 1e3) if times else 0.0

    values = [ms(times, p) for times in (found.lease_s, found.results_s, found.heartbeat_s) for p in (50, 99)]
    about = {"database": database, "load": name, "results_s": results_s, "rejected": found.rejected}
    return about | dict(zip(TIMES, values, strict=True))


@dataclass(frozen=True, slots=True)
class PlaysMeasurement(Measurement):
    """Measure a turn of a play in a process of its own, beside the same turn in the worker's process. The engine
    answers at once.
    """

    rounds: int = setting(9, "Number of measurements of each way.", 1)

    def measure(self) -> Document:
        from netem.bench.play_cost import bench_plays

        rows = [bench_plays(tokens, at_once, self.rounds) for tokens in (1024, 32768) for at_once in (1, 32)]
        return {"rows": rows}

    def shown(self, document: Document) -> Iterator[Table | str]:
        columns: Columns = [
            ("prompt", "prompt_tokens"),
            ("plays at once", "at_once"),
            ("here, ms a turn", "{here[turn_ms]:.2f}"),
            ("in a process", "{pool[turn_ms]:.2f}"),
            ("ratio", lambda row: f"{row['pool']['turn_ms'] / row['here']['turn_ms']:.2f}"),
            ("CPU of the worker, ms", "{pool[worker_cpu_ms]:.2f}"),
        ]
        yield table(document["rows"], columns)


start = command(StartMeasurement)
page = command(PageMeasurement)
publish = command(PublishMeasurement)
plan = command(PlanMeasurement)
ledger = command(LedgerMeasurement)
plays = command(PlaysMeasurement)
