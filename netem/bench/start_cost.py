"""Time of a hub from its start until it answers, from SIGTERM until its end, and from its restart after ``kill -9``
until it offers what it had stored.

The hub is ``p2pcast seed`` as users run it, in a process of its own. It answers once GET /status does, and by then it
accepts peers, too. Kernels are compiled before: the first hub of an installation has to compile them, and ends only
after the one under way. A small state is enough: the times are those of imports, kernels and records, not of weights.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from netem.fleet.processes import free_port
from p2pcast.codec.kernel_warmup import warm_up
from p2pcast.ground.errors import RetryableError
from trainer_node import Publisher

WORDS = 1 << 15
POLL_S = 0.005
DEADLINE_S = 120.0
SETTLED_S = 1.0
"""Time after the first answer until all parts of a hub run."""
Status = dict[str, Any]


def bench_start(runs: int, versions: int) -> dict[str, Any]:
    """Seconds: ``listening_s`` and ``ended_s`` of each of ``runs`` fresh hubs; ``back_s`` of ``runs`` restarts after
    ``kill -9``, each until the hub answers and shows the newest of ``versions`` stored ones.
    """
    warm_up()
    fresh, ends, back, port = [], [], [], free_port()
    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as name:
        folder = Path(name)
        base = folder / "base"
        base.mkdir()
        save_file({"w": torch.zeros(WORDS, dtype=torch.bfloat16)}, base / "model.safetensors")
        for number in range(runs):
            with _hub(base, folder / str(number), port, versions) as (hub, listening_s):
                fresh.append(listening_s)
                time.sleep(SETTLED_S)
                ends.append(_end(hub))
        state = folder / "stored"
        with _hub(base, state, port, versions):
            newest = _publish(base, state, port, versions)
        for _ in range(runs):
            with _hub(base, state, port, versions, lambda status: status["version"] == newest) as (_, answered_s):
                back.append(answered_s)
    return {
        "runs": runs,
        "versions": versions,
        "listening_s": fresh,
        "ended_s": ends,
        "back_s": back,
        "medians": {
            "listening_s": statistics.median(fresh),
            "ended_s": statistics.median(ends),
            "back_s": statistics.median(back),
        },
    }


@contextmanager
def _hub(
    base: Path, state: Path, port: int, versions: int, until: Callable[[Status], bool] = lambda status: True
) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A hub, and the seconds until its status is as wanted. It is killed at the block's end, if it still runs."""
    began_s = time.monotonic()
    words = ["seed", "--base", base, "--state", state, "--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
    words += ["--keep-deltas", versions, "--shadow", state.with_name(f"{state.name}-shadow")]
    state.mkdir(exist_ok=True)
    (state / "daemon.json").unlink(missing_ok=True)
    with (state.with_name(f"{state.name}.log")).open("ab") as log:
        hub = subprocess.Popen([sys.executable, "-P", "-m", "p2pcast.cli", *map(str, words)], stdout=log, stderr=log)
    try:
        while (status := _status(state)) is None or not until(status):
            if hub.poll() is not None or time.monotonic() - began_s > DEADLINE_S:
                raise RetryableError(f"the hub did not start: {Path(log.name).read_text()[-1000:]}")
            time.sleep(POLL_S)
        yield hub, time.monotonic() - began_s
    finally:
        if hub.poll() is None:
            hub.send_signal(signal.SIGKILL)
            hub.wait()


def _status(state: Path) -> Status | None:
    """None without an answer."""
    try:
        address = json.loads((state / "daemon.json").read_text())["http"]
        with urllib.request.urlopen(f"{address}/status", timeout=DEADLINE_S) as answer:
            return dict(json.load(answer))
    except (OSError, ValueError):
        return None


def _publish(base: Path, state: Path, port: int, versions: int) -> str:
    """Publish so many versions of a few changed words each. Returns the newest version's name."""
    weights = torch.zeros(WORDS, dtype=torch.bfloat16)
    with Publisher(f"127.0.0.1:{port}", token_file=state / "token", base=base) as publisher:
        for step in range(1, versions + 1):
            weights.view(torch.int16)[step::1024] += 1
            publisher.publish(step, {"w": weights}).wait_durable()
    status = _status(state)
    assert status is not None
    return str(status["version"])


def _end(hub: subprocess.Popen[bytes]) -> float:
    """Seconds from SIGTERM to the end. Raises RetryableError for an end with an error."""
    began_s = time.monotonic()
    hub.send_signal(signal.SIGTERM)
    if hub.wait(DEADLINE_S):
        raise RetryableError(f"the hub ended with exit code {hub.returncode}")
    return time.monotonic() - began_s
