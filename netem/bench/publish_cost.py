"""Cost of publishing for a training step. Measured are the snapshot that the optimiser waits for, and the time until a
hub has stored the version, beside a memcpy of the state's bytes in the same run.

The hub is a separate process on loopback. Tensors are square matrices; a step moves about 1 % of the bf16 values, as
with RL's learning rates. Memcpy and snapshots take turns, on the same device, into memory that was written before;
medians are compared.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch

from netem.bench.measuring import device_clock, device_name, torch_device
from netem.fleet.fleet import Fleet, Loopback
from netem.fleet.processes import Processes
from p2pcast.ground.errors import RetryableError
from trainer_node import Publisher

SIDE = 2048
"""Side of a matrix of 4 Mi elements: 8 MiB of bf16."""
MOVED = 4e-5
"""Standard deviation of a master's relative change: 1 % of the bf16 values move."""
SHARE = 0.01
WARM_STEPS = 2
"""The first version is a whole state; the second writes the publisher's other buffer for the first time."""

Tensors = dict[str, torch.Tensor]


def bench_publish(
    state_bytes: int,
    steps: int,
    *,
    side: int = SIDE,
    device: str | None = None,
    previous: Literal["gpu", "pinned"] = "gpu",
) -> dict[str, Any]:
    """``state_bytes`` of bf16, in matrices of ``side`` × ``side``. ``device``: None for the GPU if there
    is one, otherwise the CPU. Needs 6 × that in memory. Raises LocalError, RetryableError.
    """
    where = torch_device(device)
    count = max(1, state_bytes // (2 * side * side))
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="p2pcast-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as shadow,
        Processes(Path(folder)) as processes,
    ):
        hub, token = _hub(Fleet(Loopback(), processes, Path(folder), Path(shadow), ["--plaintext"], follows=False))
        for name, dtype in (("fp32 masters → bf16", torch.float32), ("bf16 → bf16", torch.bfloat16)):
            torch.manual_seed(0)
            tensors = {
                f"layers.{k}.weight": torch.randn(side, side, device=where).mul_(0.02).to(dtype) for k in range(count)
            }
            with Publisher(hub, token_file=token, previous=previous) as publisher:
                rows.append({"row": name, **_measure(publisher, tensors, len(rows) * (WARM_STEPS + steps), steps)})
    return {"state_bytes": 2 * count * side * side, "steps": steps, "device": device_name(where), "rows": rows}


def _hub(fleet: Fleet) -> tuple[str, Path]:
    """(address, token file) of a hub that answers."""
    fleet.trained.mkdir()
    fleet.hub(fleet.trained)
    fleet.until_joinable()
    return fleet.place.hub, fleet.token


def _measure(publisher: Publisher, tensors: Tensors, first_step: int, steps: int) -> dict[str, Any]:
    published = [t.to(torch.bfloat16) for t in tensors.values()]
    copies = [torch.zeros_like(t) for t in published]
    taken: dict[str, list[float]] = {"memcpy_s": [], "publish_s": [], "snapshot_s": [], "total_s": []}
    last, now = None, device_clock(published[0].device)
    for turn in range(WARM_STEPS + steps):
        _train(tensors, turn)
        begin = now()
        for target, source in zip(copies, published, strict=True):
            target.copy_(source)
        copied = now()
        handle = publisher.publish(first_step + turn + 1, tensors)
        called = time.perf_counter()
        handle.wait_snapshot()
        snapshot = time.perf_counter()
        handle.wait_durable()
        stored = time.perf_counter()
        if turn >= WARM_STEPS:
            for key, seconds in zip(
                taken, (copied - begin, called - copied, snapshot - copied, stored - copied), strict=True
            ):
                taken[key].append(seconds)
        last = handle.durable
    if last is None:
        raise RetryableError("nothing was published")
    medians = {key: statistics.median(values) for key, values in taken.items()}
    return {
        **medians,
        "snapshot_to_memcpy": round(medians["snapshot_s"] / medians["memcpy_s"], 3),
        "total_to_memcpy": round(medians["total_s"] / medians["memcpy_s"], 3),
        "bytes": last.bytes,
        "changed": last.changed,
        "params": last.params,
    }


def _train(tensors: Tensors, turn: int) -> None:
    """The changes of one step."""
    for tensor in tensors.values():
        generator = torch.Generator(tensor.device).manual_seed(turn)
        if tensor.dtype == torch.bfloat16:
            moved = torch.randint(
                tensor.numel(), (int(SHARE * tensor.numel()),), generator=generator, device=tensor.device
            )
            tensor.view(torch.int16).view(-1)[moved] += 1
        else:
            tensor.mul_(torch.randn(tensor.shape, generator=generator, device=tensor.device).mul_(MOVED).add_(1))
