"""``python -m netem.gpu``: runs all steps, prints their figures, and writes one JSON document. Called by `make gpu`."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from netem.bench import step_run
from netem.bench.measuring import torch_device
from netem.gpu.gpu_machine import describe, state_bytes
from netem.gpu.gpu_page import add, page, section
from netem.gpu.gpu_steps import STEPS, GpuStep, StepSizes
from p2pcast.cli.options import PATH
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground.errors import P2PCastError, UsageError
from p2pcast.ground.limits import GIB

TAIL_LINES = 15
"""Lines of a failed step's output that the document keeps."""
COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", help="torch device, such as cuda:1 or cpu.  [default: the GPU if any, otherwise the CPU]")
@click.option(
    "--state-gib",
    type=click.FloatRange(min=0.001),
    help="Size of the bf16 state in GiB; smaller where memory or disk is.  [default: 15, a model of 8 billion "
    "parameters; on a CPU 0.25]",
)
@click.option("--versions", type=click.IntRange(2), default=20, help="Number of versions installed.")
@click.option("--step", "chosen", multiple=True, type=click.Choice(list(STEPS)), help="Only this step; repeatable.")
@click.option("-o", "--output", type=PATH, default="build/gpu.json", help="File for the JSON document.")
@click.option("--record", is_flag=True, help="Result added to docs/benchmarks/gpu.json, and the page written anew.")
@click.option("--add", "other", type=PATH, help="No run: add this document of another machine to the page.")
def main(
    device: str | None,
    state_gib: float | None,
    versions: int,
    chosen: tuple[str, ...],
    output: Path,
    record: bool,
    other: Path | None,
) -> None:
    """Prove and measure on a GPU what p2pcast does there: dense passes, publishing, installing.

    Steps whose packages are missing are left out by name. Without a GPU the steps compute on CPU tensors. Exit code 1:
    a step failed.
    """
    try:
        if other is not None:
            add(_document(other))
            return
        document = run(
            device, int(state_gib * GIB) if state_gib else None, versions, chosen or tuple(STEPS), output.parent
        )
        atomic_write(output, (json.dumps(document, indent=1) + "\n").encode())
        print(page([document]))
        if record:
            add(document)
    except P2PCastError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if any("failed" in row for row in document["steps"].values()):
        sys.exit(1)


def _document(path: Path) -> dict[str, Any]:
    """The document in a file. Raises UsageError, LocalError."""
    with explained("read", path):
        content = path.read_bytes()
    try:
        document: dict[str, Any] = json.loads(content)
        section(document)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} holds no result of `make gpu` ({error!r}); give it the build/gpu.json of a run"
        ) from None
    return document


def run(
    device: str | None, wanted_bytes: int | None, versions: int, chosen: tuple[str, ...], folder: Path
) -> dict[str, Any]:
    """Run the chosen steps, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe(device)
    sizes = StepSizes(state_bytes(machine, wanted_bytes, folder), versions, str(torch_device(device)))
    steps: dict[str, Any] = {}
    for name in chosen:
        step = STEPS[name]
        if step.only_cuda and machine["kind"] != "cuda":
            steps[name] = {"left_out": "for a GPU alone"}
        elif (why := step_run.lacks(step.needs)) is not None:
            steps[name] = {"left_out": why}
        else:
            print(f"{name}: {step.shows}", file=sys.stderr, flush=True)
            steps[name] = run_step(step, sizes)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"time": now, "machine": machine, "state_bytes": sizes.state_bytes, "versions": versions, "steps": steps}


def run_step(step: GpuStep, sizes: StepSizes) -> dict[str, Any]:
    """``result`` of a step and its seconds, or the end of its output as ``failed``."""
    begun = time.monotonic()
    environment = os.environ | {"P2PCAST_TEST_DEVICE": sizes.device}
    ended = step_run.run([sys.executable, *step.arguments(sizes)], step.limit_s, environment=environment)
    if ended.overdue:
        return {"failed": ended.overdue}
    if ended.code:
        return {"failed": "\n".join([*ended.out, *ended.error][-TAIL_LINES:]) or ended.why}
    try:
        result = json.loads(ended.out[-1]) if step.json else counts(ended.out[-1])
        kept = {key: result[key] for key in step.keys or result}
    except (ValueError, LookupError):
        return {"failed": "\n".join(["the last line is no result:", *ended.out[-TAIL_LINES:]])}
    return {"result": kept, "s": round(time.monotonic() - begun, 1)}


def counts(line: str) -> dict[str, int]:
    """Counts from pytest's last line, such as passed."""
    return {what: int(number) for number, what in COUNTS.findall(line)}


if __name__ == "__main__":
    main()
