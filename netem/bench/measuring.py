"""The measuring core of benchmarks: works in turns, on one core or a torch device, and anonymous memory.

Anonymous resident memory (RssAnon) excludes page cache and mapped files.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from p2pcast.ground import limits

if TYPE_CHECKING:
    import torch

SAMPLE_S = 0.05


def take_turns(
    works: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Median seconds of each work, measured in turns after one uncounted round. By default CPU seconds, in which time
    of other programs on the core does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            begin = clock()
            work()
            if turn:
                taken[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in taken.items()}


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process on one of its cores during a measurement."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def quantile(values: Sequence[float], share: float, digits: int = 6) -> float | None:
    """None without values."""
    return round(float(np.quantile(np.array(values, dtype=np.float64), share)), digits) if values else None


def anonymous_bytes(process: int | str = "self") -> int:
    """Of a process, by its id; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * limits.KIB for line in lines if line.startswith("RssAnon:")), 0)


class Peak(threading.Thread):
    """Samples a process's memory every ``every_s`` seconds and keeps the largest value."""

    def __init__(self, process: int | str = "self", every_s: float = SAMPLE_S) -> None:
        super().__init__(daemon=True, name="peak")
        self.bytes = 0
        self._process, self._every_s = process, every_s
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.bytes = max(self.bytes, anonymous_bytes(self._process))

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return max(self.bytes, anonymous_bytes(self._process))


def torch_device(name: str | None) -> torch.device:
    """``name``: None for the GPU if there is one, otherwise the CPU."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def device_name(device: torch.device) -> str:
    """For a table's title."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def device_clock(device: torch.device) -> Callable[[], float]:
    """A clock that waits until the device has done its work."""
    import torch

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now
