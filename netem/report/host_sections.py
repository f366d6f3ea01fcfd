"""Report sections about one machine: a relaying peer, a publishing trainer, a serving engine, a ledger. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netem.bench.figures_text import Columns, Row
from netem.lab.scenario import Requirement
from netem.report.section_text import Picture, RivalComparison, Section, figure, judged, share, table, table_of
from p2pcast.ground.limits import MIB

Document = Mapping[str, Any]
PLAIN, TLS = "cpu_s_per_gb_plaintext", "cpu_s_per_gb_tls"
GROWTH: Final = 1.25
"""Largest size in the second half of a run, as a multiple of the largest in the first half."""
GROWING: Final = {
    "rows": "rows",
    "database_bytes": "database, bytes",
    "body_bytes": "results, bytes",
    "resident_bytes": "memory, bytes",
    "cpu_ms": "CPU a result, ms",
}


def relay(document: Document) -> Section:
    blocks = [
        f"A peer in the middle of a chain, {figure(document['rate_bps'] / 1e9)} Gbit/s, "
        f"{document['payload_bytes'] / MIB:.4g} MiB over {document['stripes']} stripes. *Bare*: a relay that reads, "
        f"hashes and forwards, without the protocol. Peak anonymous memory {document['peak_rss_bytes'] / 1e6:.0f} MB.",
        table(
            ["link", "CPU s/GB", "÷ bare"],
            [
                ["bare", document["cpu_s_per_gb_bare"], 1],
                ["bare, TLS", document["cpu_s_per_gb_bare_tls"], 1],
                ["plain text", document[PLAIN], document["plaintext_to_bare"]],
                ["TLS", document[TLS], document["tls_to_bare"]],
            ],
        ),
    ]
    bare = Requirement("CPU s/GB, TLS", TLS, below="cpu_s_per_gb_bare_tls")
    compared = [
        *judged("relay", [document], Requirement("CPU s/GB, plain text", PLAIN, below=1.0)),
        *judged("relay", [document], Requirement("CPU s/GB, TLS", TLS, below=2.0)),
        *judged("relay", [document], Requirement("peak anonymous memory, bytes", "peak_rss_bytes", below=300e6)),
        *judged("relay", [document], bare, "bare relay behind TLS"),
    ]
    return Section("A peer that relays", blocks, compared)


def publish(document: Document) -> Section:
    # A record of before 0.2 states the CPU's threads.
    device = document.get("device") or f"the CPU with {document['threads']} threads"
    columns: Columns = [
        ("tensors", "row"), ("changed", lambda r: share(r["changed"] / r["params"])),
        ("delta, MB", "{bytes:MB .2f}"), ("memcpy, ms", "{memcpy_s:ms .0f}"), ("snapshot, ms", "{snapshot_s:ms .0f}"),
        ("÷ memcpy", "snapshot_to_memcpy"), ("stored, ms", "{total_s:ms .0f}"), ("÷ memcpy", "total_to_memcpy"),
    ]  # fmt: skip
    blocks = [
        f"Cost of publishing for a training step, {document['state_bytes'] / MIB:.4g} MiB of bf16 on the CPU, median "
        f"of {document['steps']}. *snapshot*: until the optimiser may continue. *stored*: until a hub on the same "
        f"cores has stored the version. Compared in turns with `Tensor.copy_` on {device}.",
        table_of(document["rows"], columns),
    ]
    hold = Requirement("snapshot in ms, {row}", "snapshot_s", below="memcpy_s")
    return Section(
        "Publishing from the trainer", blocks, list(judged("publish", document["rows"], hold, "memcpy", times=1e3))
    )


def live(document: Document) -> Section:
    figures = {
        "pause_median_s": "pause, median", "pause_p99_s": "p99", "gap_p50_s": "gap at a switch, p50",
        "gap_p99_s": "p99", "gap_elsewhere_p50_s": "elsewhere, p50", "gap_elsewhere_p99_s": "p99",
    }  # fmt: skip
    rows = document["rows"]
    requests = ", ".join(f"{key} {value}" for key, value in document["requests"].items())
    blocks = [
        f"{document['versions']} versions of a model of {figure(document['params'] / 1e6)} M parameters into one vLLM "
        f"server (tensor parallel {document['tensor_parallel']}) under {document['clients']} streaming clients, `--kv "
        f"{document['kv']}`; then the same by vLLM's own reload. In ms. Requests: {requests}. Verdict on bits and "
        f"answers: {document['verdict']}.",
        table_of(rows, [("", "system"), *((head, f"{{{key}:ms .1f}}") for key, head in figures.items())]),
    ]
    pause = Requirement("pause of vLLM's reload ÷ ours", "pause_ratio", above=20.0)
    compared = list(judged("live", [document], pause))
    ours, theirs = (row["system"] for row in rows)
    for key, head in figures.items():
        if not key.startswith("gap_elsewhere"):
            hold = Requirement(f"{head}, ms ({key})", key, {"system": (ours,)}, {"system": (theirs,)}, below=1.0)
            compared += judged("live", rows, hold, "{system}", times=1e3)
    if document["verdict"] != "PASS":
        failed = {"failed": sum(not check["ok"] for check in document["checks"])}
        compared += judged("live", [failed], Requirement("checks that failed", "failed", below=0))
    shown = {"pause_median_s": "pause, median", "pause_p99_s": "pause, p99"}
    series = {
        row["system"]: {head: 1e3 * row[key] for key, head in shown.items() if row[key] is not None} for row in rows
    }
    picture = Picture("live", "pause of vLLM", "", "ms", series, bars=True)
    return Section("Switching under load", blocks, compared, [picture])


def ledger(document: Document) -> Section:
    times = {
        "lease_p50_ms": "lease, p50", "lease_p99_ms": "p99", "results_p50_ms": "results, p50", "results_p99_ms": "p99",
        "heartbeat_p50_ms": "heartbeat, p50", "heartbeat_p99_ms": "p99",
    }  # fmt: skip
    loads: Columns = [("database", "database"), ("load", "load"), ("results/s", "results_s")]
    blocks = [
        "A ledger under simulated workers over HTTP, with results of 1024 tokens. *Full load*: workers that never rest,"
        " with 32 leases and results in a request. Paced workers hold 8 leases each, send heartbeats, and wait for "
        "leases in long polls; together they hand in half of what full load gave. Times in ms. One thread that writes "
        f"the same bytes and rows without any rules reaches {figure(document['limit_results_s'])} results/s on this "
        "disk.",
        table_of(document["rows"], [*loads, *((head, f"{{{key}:.0f}}") for key, head in times.items())]),
    ]
    full = Requirement("results/s under full load", "results_s", above=500.0)
    paced = Requirement("lease at half the load, p99, ms", "lease_p99_ms", below=100.0)
    compared: list[RivalComparison] = []
    for at, row in enumerate(document["rows"]):
        compared += judged(f"ledger, {row['database']}", [row], paced if at % 2 else full)
    if document["growth"]:
        columns: Columns = [
            ("database", "database"), ("results", "results"), ("rows", "rows"),
            ("database, MB", "{database_bytes:MB .1f}"), ("results, MB", "{body_bytes:MB .1f}"),
            ("memory, MB", "{resident_bytes:MB .1f}"), ("CPU a result, ms", "{cpu_ms:.2f}"),
        ]  # fmt: skip
        blocks += [
            "Growth in the course of a run whose batches retention forgets: 256 results a batch, of which the ledger "
            "keeps 16 batches. The CPU time is that of the ledger's process for each result since the row before.",
            table_of(document["growth"], columns),
        ]
    for database in dict.fromkeys(row["database"] for row in document["growth"]):
        rows = [row for row in document["growth"] if row["database"] == database]
        found = _halves(rows)
        hold = Requirement("second half ÷ first half: {name}", "ratio", below=GROWTH)
        compared += judged(f"ledger, {database}", found, hold)
    return Section("A ledger under load", blocks, compared)


def _halves(rows: list[Row]) -> list[Row]:
    half = len(rows) // 2
    return [
        {"name": name, "ratio": max(row[key] for row in rows[half:]) / max(row[key] for row in rows[:half])}
        for key, name in GROWING.items()
    ]
