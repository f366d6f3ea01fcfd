"""The page docs/benchmarks-gpu.md, from the recorded document of each device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from netem.gpu.gpu_steps import STEPS, Result
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.limits import GIB

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "benchmarks" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks-gpu.md"
HEAD = """# On a GPU

`make gpu` writes these figures: dense passes, publishing and installing on the device that holds the weights. Every
install is compared bit for bit with a model loaded from the same version. Steps whose packages are missing are left
out, and so are steps for a GPU where there is none. `make gpu ADD=FILE` adds the document of another machine.
"""


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
    return STEPS[name].text(row["result"])
