"""Report sections about the rollout plane: a ledger under load. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netem.report.section_text import Comparison, Section, figure, table

Document = Mapping[str, Any]
RESULTS_S: Final = 500.0
LEASE_P99_MS: Final = 100.0
GROWTH: Final = 1.25
"""Largest size in the second half of a run, as a multiple of the largest in the first half."""
GROWING: Final = {
    "rows": "rows",
    "database_bytes": "database, bytes",
    "body_bytes": "results, bytes",
    "resident_bytes": "memory, bytes",
    "cpu_ms": "CPU a result, ms",
}


def ledger(document: Document) -> Section:
    times = ("lease_p50_ms", "lease_p99_ms", "results_p50_ms", "results_p99_ms", "heartbeat_p50_ms", "heartbeat_p99_ms")
    blocks = [
        "A ledger under simulated workers over HTTP, with results of 1024 tokens. *Full load*: workers that never rest,"
        " with 32 leases and results in a request. Paced workers hold 8 leases each, send heartbeats, and wait for "
        "leases in long polls; together they hand in half of what full load gave. Times in ms. One thread that writes "
        f"the same bytes and rows without any rules reaches {figure(document['limit_results_s'])} results/s on this "
        "disk.",
        table(
            ["database", "load", "results/s", "lease, p50", "p99", "results, p50", "p99", "heartbeat, p50", "p99"],
            (
                [row["database"], row["load"], row["results_s"], *(f"{row[name]:.0f}" for name in times)]
                for row in document["rows"]
            ),
        ),
    ]
    compared = []
    for full, paced in zip(document["rows"][::2], document["rows"][1::2], strict=True):
        where = f"ledger, {full['database']}"
        compared += [
            Comparison(where, "results/s under full load", full["results_s"], RESULTS_S, less=False),
            Comparison(where, "lease at half the load, p99, ms", paced["lease_p99_ms"], LEASE_P99_MS),
        ]
    if document["growth"]:
        blocks += [
            "Growth in the course of a run whose batches retention forgets: 256 results a batch, of which the ledger "
            "keeps 16 batches. The CPU time is that of the ledger's process for each result since the row before.",
            table(
                ["database", "results", "rows", "database, MB", "results, MB", "memory, MB", "CPU a result, ms"],
                (
                    [
                        row["database"], row["results"], row["rows"],
                        *(f"{row[key] / 1e6:.1f}" for key in ("database_bytes", "body_bytes", "resident_bytes")),
                        f"{row['cpu_ms']:.2f}",
                    ]
                    for row in document["growth"]
                ),
            ),
        ]  # fmt: skip
    for database in dict.fromkeys(row["database"] for row in document["growth"]):
        rows = [row for row in document["growth"] if row["database"] == database]
        half = len(rows) // 2
        for key, name in GROWING.items():
            ratio = max(row[key] for row in rows[half:]) / max(row[key] for row in rows[:half])
            compared.append(Comparison(f"ledger, {database}", f"second half ÷ first half: {name}", ratio, GROWTH))
    return Section("A ledger under load", blocks, compared)
