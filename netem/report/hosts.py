"""Sections about one machine: a relaying peer, a publishing trainer, a serving engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netem.report.text import Loss, Picture, Section, figure, share, table
from p2pcast.limits import MIB

Document = Mapping[str, Any]
PLAINTEXT_S_GB, TLS_S_GB, RSS_BYTES = 1.0, 2.0, 300e6
PAUSE_RATIO: Final = 20.0


def relay(document: Document) -> Section:
    links = (
        ("bare", "bare", None), ("bare, TLS", "bare_tls", None), ("plain text", "plaintext", "plaintext_to_bare"), ("TLS", "tls", "tls_to_bare")
    )  # fmt: skip
    blocks = [
        f"A peer in the middle of a chain, {figure(document['rate_bps'] / 1e9)} Gbit/s, {document['payload_bytes'] / MIB:.4g} MiB over {document['stripes']} stripes. *Bare*: read, hash, send on, write; no protocol. Peak anonymous memory "
        f"{document['peak_rss_bytes'] / 1e6:.0f} MB.",
        table(
            ["link", "CPU s/GB", "÷ bare"],
            ([title, document[f"cpu_s_per_gb_{name}"], 1 if key is None else document[key]] for title, name, key in links),
        ),
    ]  # fmt: skip
    compared = [
        Loss("relay", "CPU s/GB, plain text", document["cpu_s_per_gb_plaintext"], PLAINTEXT_S_GB),
        Loss("relay", "CPU s/GB, TLS", document["cpu_s_per_gb_tls"], TLS_S_GB),
        Loss("relay", "peak anonymous memory, bytes", document["peak_rss_bytes"], RSS_BYTES),
        Loss("relay", "CPU s/GB, TLS", document["cpu_s_per_gb_tls"], document["cpu_s_per_gb_bare_tls"], "bare relay behind TLS"),
    ]
    return Section("A peer that relays", blocks, compared)


def publish(document: Document) -> Section:
    blocks = [
        f"What a training step pays, {document['state_bytes'] / MIB:.4g} MiB of bf16 on the CPU, median of {document['steps']}: *snapshot* is until the optimiser may go on, *stored* until the version is at a hub on the same cores; beside `Tensor.copy_` with "
        f"{document['threads']} threads, in turns.",
        table(
            ["tensors", "changed", "delta, MB", "memcpy, ms", "snapshot, ms", "÷ memcpy", "stored, ms", "÷ memcpy"],
            (
                [
                    r["row"], share(r["changed"] / r["params"]), f"{r['bytes'] / 1e6:.2f}",
                    *(f"{1e3 * r[key]:.0f}" for key in ("memcpy_s", "snapshot_s")), r["snapshot_to_memcpy"],
                    f"{1e3 * r['total_s']:.0f}", r["total_to_memcpy"],
                ]
                for r in document["rows"]
            ),
        ),
    ]  # fmt: skip
    compared = [
        Loss("publish", f"snapshot in ms, {r['row']}", 1e3 * r["snapshot_s"], 1e3 * r["memcpy_s"], "memcpy") for r in document["rows"]
    ]  # fmt: skip
    return Section("Publishing from the trainer", blocks, compared)


def live(document: Document) -> Section:
    keys = ("pause_median_s", "pause_p99_s", "gap_p50_s", "gap_p99_s", "gap_elsewhere_p50_s", "gap_elsewhere_p99_s")
    heads = ("pause, median", "p99", "gap at a switch, p50", "p99", "elsewhere, p50", "p99")
    requests = document["requests"]
    blocks = [
        f"{document['versions']} versions of a model of {figure(document['params'] / 1e6)} M parameters into one vLLM server (tensor parallel {document['tensor_parallel']}) under {document['clients']} streaming clients, `--kv {document['kv']}`; then the same by "
        f"vLLM's own reload. In ms. Requests: {', '.join(f'{key} {value}' for key, value in requests.items())}. Verdict on bits and answers: {document['verdict']}.",
        table(
            ["", *heads],
            ([r["system"], *(None if r[key] is None else f"{1e3 * r[key]:.1f}" for key in keys)] for r in document["rows"]),
        ),
    ]  # fmt: skip
    compared = []
    if document["pause_ratio"] is not None:
        compared.append(Loss("live", "pause of vLLM's reload ÷ ours", document["pause_ratio"], PAUSE_RATIO, less=False))
    ours, theirs = document["rows"]
    for key, head in zip(keys, heads, strict=True):
        if ours[key] is not None and theirs[key] is not None and not key.startswith("gap_elsewhere"):
            compared.append(Loss("live", f"{head}, ms ({key})", 1e3 * ours[key], 1e3 * theirs[key], theirs["system"]))
    if document["verdict"] != "PASS":
        failed = sum(not check["ok"] for check in document["checks"])
        compared.append(Loss("live", "checks that failed", failed, 0))
    series = {r["system"]: {head: 1e3 * r[key] for key, head in (("pause_median_s", "pause, median"), ("pause_p99_s", "pause, p99")) if r[key] is not None} for r in document["rows"]}  # fmt: skip
    return Section(
        "Switching under load", blocks, compared, [Picture("live", "how long vLLM stands still", "", "ms", series, bars=True)]
    )
