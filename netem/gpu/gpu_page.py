"""The page docs/benchmarks-gpu.md, from the recorded document of each device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from netem.gpu.gpu_steps import STEPS
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.limits import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "benchmarks" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks-gpu.md"
HEAD = """# On a GPU

`make gpu` writes these figures: dense passes, publishing and installing on the device that holds the weights. Every
install is compared bit for bit with a model loaded from the same version. Steps whose packages are missing are left
out, and so are steps for a GPU where there is none. `make gpu ADD=FILE` adds the document of another machine.
"""

Result = dict[str, Any]


def add(document: Result) -> None:
    """Record a document in place of an earlier one of the same device, and write the page."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record[document["machine"]["device"]] = document
    atomic_write(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    atomic_write(PAGE, page(record.values()).encode())


def page(documents: Iterable[Result]) -> str:
    return "\n".join([HEAD, *(section(document) for document in documents)])


def section(document: Result) -> str:
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    memory = "" if machine["device_bytes"] is None else f"{machine['device_bytes'] / GIB:.0f} GiB on the device, "
    lines = [
        f"## {machine['device']}",
        "",
        f"{document['time'][:10]}; {memory}{machine['cores']} cores, {machine['memory_bytes'] / GIB:.0f} GiB; Python "
        f"{machine['python']}, {packages}. State: {document['state_bytes'] / GIB:.2f} GiB of bf16.",
        "",
        "| step | what it shows | result |",
        "|---|---|---|",
    ]
    for name, row in document["steps"].items():
        cells = (name, STEPS[name].shows, outcome(name, row))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def outcome(name: str, row: Result) -> str:
    if "left_out" in row:
        return f"left out: {row['left_out']}"
    if "failed" in row:
        return f"**failed**: {row['failed'].splitlines()[-1]}"
    return FIGURES[name](row["result"])


def passes(result: Result) -> str:
    rows = (
        f"{row['pass']} {row['state_bytes_per_s'] / 1e9:.1f} ({row['speed_to_copy']:.2f})" for row in result["rows"]
    )
    return f"GB of state a second (÷ copy): {'; '.join(rows)}"


def install(result: Result) -> str:
    graph = "a CUDA graph kept computing with the new weights" if result["cuda_graph"] else "no CUDA graph"
    return (
        f"{result['versions']} versions of {result['state_bytes'] / MIB:.0f} MiB, {result['values']} values each; pause"
        f" p50 {1e3 * result['pause_p50_s']:.1f} ms, p99 {1e3 * result['pause_p99_s']:.1f} ms; prepared beside in "
        f"{1e3 * result['prepare_p50_s']:.0f} ms; {graph}"
    )


def publish(result: Result) -> str:
    return "; ".join(
        f"{row['row']}: snapshot {1e3 * row['snapshot_s']:.0f} ms ({row['snapshot_to_memcpy']:.1f} × a copy), stored "
        f"after {1e3 * row['total_s']:.0f} ms, {row['bytes'] / 1e6:.1f} MB"
        for row in result["rows"]
    )


def tests(result: Result) -> str:
    return ", ".join(f"{number} {what}" for what, number in result.items())


def engine(result: Result) -> str:
    rows = (
        f"{row['system']}: pause median {1e3 * row['pause_median_s']:.0f} ms, p99 {1e3 * row['pause_p99_s']:.0f} ms"
        for row in result["rows"]
    )
    return f"{result['verdict']}; {'; '.join(rows)}"


def sparse(result: Result) -> str:
    found = result["agreement"]
    speeds = ", ".join(f"{row['ratio']:.2f} at {row['length']} tokens" for row in result["rows"])
    return (
        "full budget: bit for bit dense; mean gap to the learner in nats: "
        f"dense {found['dense_gap']:.1e}, sparse {found['sparse_gap']:.1e}, effect of missing pages "
        f"{found['effect']:.1e}; speed ÷ dense: {speeds}"
    )


def quantised(result: Result) -> str:
    return "; ".join(
        f"{row['engine']}: {row['error'] or format(row['kl'], '.1e') + ' nats a token'}" for row in result["engines"]
    )


FIGURES: dict[str, Callable[[Result], str]] = {
    "passes": passes,
    "install": install,
    "publish": publish,
    "publish-pinned": publish,
    "tests": tests,
    "engine": engine,
    "sparse": sparse,
    "quantised": quantised,
}
