"""Report sections about one machine: a relaying peer, a publishing trainer, a serving engine, a ledger. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netem.bench.figures_text import Columns, Row, value_of
from netem.lab.scenario import Requirement
from netem.report.section_text import Picture, RivalComparison, Section, data_of, figure, judged, share, table, table_of
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
        f"CPU of a peer in the middle of a chain at {figure(document['rate_bps'] / 1e9)} Gbit/s, "
        f"{document['payload_bytes'] / MIB:.4g} MiB over {document['stripes']} stripes. A *bare* relay reads, hashes "
        f"and forwards, without the protocol. Peak anonymous memory {document['peak_rss_bytes'] / 1e6:.0f} MB.",
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
        f"Cost of publishing for a training step: {document['state_bytes'] / MIB:.4g} MiB of bf16, beside "
        f"`Tensor.copy_` on {device}; medians of {document['steps']}. *Snapshot*: until the optimiser may continue. "
        "*Stored*: until a hub on the same cores has the version.",
        table_of(document["rows"], columns),
    ]
    hold = Requirement("snapshot in ms", "snapshot_s", below="memcpy_s")
    compared = list(judged("publish", document["rows"], hold, "memcpy", case="{row}", times=1e3))
    return Section("Publishing from the trainer", blocks, compared)


def live(document: Document) -> Section:
    figures = {
        "pause_median_s": "pause, median", "pause_p99_s": "pause, p99", "gap_p50_s": "gap at a switch, p50",
        "gap_p99_s": "gap at a switch, p99", "gap_elsewhere_p50_s": "elsewhere, p50",
        "gap_elsewhere_p99_s": "elsewhere, p99",
    }  # fmt: skip
    rows = document["rows"]
    requests = ", ".join(f"{key} {value}" for key, value in document["requests"].items())
    blocks = [
        f"{document['versions']} versions of {figure(document['params'] / 1e6)} M parameters into one vLLM server "
        f"(tensor parallel {document['tensor_parallel']}) under {document['clients']} streaming clients, `--kv "
        f"{document['kv']}`; then the same by vLLM's own reload. In ms. Requests: {requests}. Verdict on bits and "
        f"answers: {document['verdict']}.",
        table_of(rows, [("", "system"), *((head, f"{{{key}:ms .1f}}") for key, head in figures.items())]),
    ]
    pause = Requirement("pause of vLLM's reload ÷ p2pcast's", "pause_ratio", above=20.0)
    compared = list(judged("live", [document], pause))
    ours, theirs = (row["system"] for row in rows)
    for key, head in figures.items():
        if not key.startswith("gap_elsewhere"):
            hold = Requirement(f"{head}, ms", key, {"system": (ours,)}, {"system": (theirs,)}, below=1.0)
            compared += judged("live", rows, hold, "{system}", times=1e3)
    if document["verdict"] != "PASS":
        failed = {"failed": sum(not check["ok"] for check in document["checks"])}
        compared += judged("live", [failed], Requirement("checks that failed", "failed", below=0))
    shown = {"pause_median_s": "pause, median", "pause_p99_s": "pause, p99"}
    series = {
        row["system"]: {head: 1e3 * row[key] for key, head in shown.items() if row[key] is not None} for row in rows
    }
    picture = Picture("live", "pause of vLLM", "", "ms", series, bars=True)
    pauses = [value_of(row, "{pause_median_s:ms .1f}") for row in rows]
    best = ["pause of a vLLM engine for a version, ms", pauses[0], f"{theirs} {pauses[1]}"]
    return Section("Switching under load", blocks, compared, [picture], best=[best])


def ledger(document: Document) -> Section:
    times = {
        "lease_p50_ms": "lease, p50", "lease_p99_ms": "lease, p99", "results_p50_ms": "results, p50",
        "results_p99_ms": "results, p99", "heartbeat_p50_ms": "heartbeat, p50", "heartbeat_p99_ms": "heartbeat, p99",
    }  # fmt: skip
    loads: Columns = [("database", "database"), ("load", "load"), ("results/s", "results_s")]
    blocks = [
        "A ledger under simulated workers over HTTP, with results of 1024 tokens; times in ms. *Full load*: workers "
        "never rest, with 32 leases and results in a request. *Paced*: they hand in half as much, with 8 leases each, "
        "heartbeats and long polls. *Growth*: over a run of which the ledger keeps 16 batches of 256 results. One "
        "thread that writes the same bytes and rows without any rules reaches "
        f"{figure(document['limit_results_s'])} results/s on this disk.",
        table_of(document["rows"], [*loads, *((head, f"{{{key}:.0f}}") for key, head in times.items())]),
    ]
    full = Requirement("results/s under full load", "results_s", above=500.0)
    paced = Requirement("lease at half the load, p99, ms", "lease_p99_ms", below=100.0)
    compared: list[RivalComparison] = []
    for at, row in enumerate(document["rows"]):
        compared += judged(f"ledger, {row['database']}", [row], paced if at % 2 else full)
    growth = data_of(document["growth"], [(key, key) for key in ("database", "results", *GROWING)])
    for database in dict.fromkeys(row["database"] for row in document["growth"]):
        rows = [row for row in document["growth"] if row["database"] == database]
        hold = Requirement("second half ÷ first half", "ratio", below=GROWTH)
        compared += judged(f"ledger, {database}", _halves(rows), hold, case="{name}")
    return Section("A ledger under load", blocks, compared, data={"ledger-growth": growth} if growth.rows else {})


def _halves(rows: list[Row]) -> list[Row]:
    half = len(rows) // 2
    return [
        {"name": name, "ratio": max(row[key] for row in rows[half:]) / max(row[key] for row in rows[:half])}
        for key, name in GROWING.items()
    ]
