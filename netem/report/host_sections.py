"""Report sections about one machine: a relaying peer, a publishing trainer, a serving engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from netem.report.section_text import Comparison, Picture, Section, figure, share, table
from p2pcast.ground.limits import MIB

Document = Mapping[str, Any]
PLAINTEXT_S_GB, TLS_S_GB, RSS_BYTES = 1.0, 2.0, 300e6
PAUSE_RATIO: Final = 20.0


def relay(document: Document) -> Section:
    links = (
        ("bare", "bare", None),
        ("bare, TLS", "bare_tls", None),
        ("plain text", "plaintext", "plaintext_to_bare"),
        ("TLS", "tls", "tls_to_bare"),
    )
    blocks = [
        f"A peer in the middle of a chain, {figure(document['rate_bps'] / 1e9)} Gbit/s, "
        f"{document['payload_bytes'] / MIB:.4g} MiB over {document['stripes']} stripes. *Bare*: a relay that reads, "
        f"hashes and forwards, without the protocol. Peak anonymous memory {document['peak_rss_bytes'] / 1e6:.0f} MB.",
        table(
            ["link", "CPU s/GB", "÷ bare"],
            (
                [title, document[f"cpu_s_per_gb_{name}"], 1 if key is None else document[key]]
                for title, name, key in links
            ),
        ),
    ]
    compared = [
        Comparison("relay", "CPU s/GB, plain text", document["cpu_s_per_gb_plaintext"], PLAINTEXT_S_GB),
        Comparison("relay", "CPU s/GB, TLS", document["cpu_s_per_gb_tls"], TLS_S_GB),
        Comparison("relay", "peak anonymous memory, bytes", document["peak_rss_bytes"], RSS_BYTES),
        Comparison(
            "relay",
            "CPU s/GB, TLS",
            document["cpu_s_per_gb_tls"],
            document["cpu_s_per_gb_bare_tls"],
            "bare relay behind TLS",
        ),
    ]
    return Section("A peer that relays", blocks, compared)


def publish(document: Document) -> Section:
    blocks = [
        f"Cost of publishing for a training step, {document['state_bytes'] / MIB:.4g} MiB of bf16 on the CPU, median "
        f"of {document['steps']}. *snapshot*: until the optimiser may continue. *stored*: until a hub on the same "
        f"cores has stored the version. Compared in turns with `Tensor.copy_` with {document['threads']} threads.",
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
        Comparison("publish", f"snapshot in ms, {r['row']}", 1e3 * r["snapshot_s"], 1e3 * r["memcpy_s"], "memcpy")
        for r in document["rows"]
    ]
    return Section("Publishing from the trainer", blocks, compared)


def live(document: Document) -> Section:
    keys = ("pause_median_s", "pause_p99_s", "gap_p50_s", "gap_p99_s", "gap_elsewhere_p50_s", "gap_elsewhere_p99_s")
    heads = ("pause, median", "p99", "gap at a switch, p50", "p99", "elsewhere, p50", "p99")
    requests = document["requests"]
    blocks = [
        f"{document['versions']} versions of a model of {figure(document['params'] / 1e6)} M parameters into one vLLM "
        f"server (tensor parallel {document['tensor_parallel']}) under {document['clients']} streaming clients, `--kv "
        f"{document['kv']}`; then the same by vLLM's own reload. In ms. Requests: "
        f"{', '.join(f'{key} {value}' for key, value in requests.items())}. Verdict on bits and answers: "
        f"{document['verdict']}.",
        table(
            ["", *heads],
            (
                [r["system"], *(None if r[key] is None else f"{1e3 * r[key]:.1f}" for key in keys)]
                for r in document["rows"]
            ),
        ),
    ]
    compared = []
    if document["pause_ratio"] is not None:
        compared.append(
            Comparison("live", "pause of vLLM's reload ÷ ours", document["pause_ratio"], PAUSE_RATIO, less=False)
        )
    ours, theirs = document["rows"]
    for key, head in zip(keys, heads, strict=True):
        if ours[key] is not None and theirs[key] is not None and not key.startswith("gap_elsewhere"):
            compared.append(
                Comparison("live", f"{head}, ms ({key})", 1e3 * ours[key], 1e3 * theirs[key], theirs["system"])
            )
    if document["verdict"] != "PASS":
        failed = sum(not check["ok"] for check in document["checks"])
        compared.append(Comparison("live", "checks that failed", failed, 0))
    series = {
        r["system"]: {
            head: 1e3 * r[key]
            for key, head in (("pause_median_s", "pause, median"), ("pause_p99_s", "pause, p99"))
            if r[key] is not None
        }
        for r in document["rows"]
    }
    return Section(
        "Switching under load",
        blocks,
        compared,
        [Picture("live", "pause of vLLM", "", "ms", series, bars=True)],
    )
