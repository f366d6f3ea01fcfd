"""Speed of two cores compared with one: the same cells by the thread map that publishing and offline commands use
(``parallel.ordered_map``).

One thread and two take turns in one run. The fastest of many turns of each are compared, since other programs can only
slow a turn down. Wall time shows how long two threads wait for each other; it is meaningless if other programs keep the
cores busy. Threads are started anew in each turn, as for each version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from netem.bench.codec_comparison.comparison import Dataset, Work, decode_part, encode_part, tiled, work_of
from p2pcast.ground.ordered_map import ordered_map

WORKING_SET_BYTES = 256 << 20
"""At least thirty cells: with ten, the last cell alone would cost the second core a tenth."""
TURNS = 25


def two_cores(
    dataset: Dataset, codec: str, *, working_set_bytes: int = WORKING_SET_BYTES, turns: int = TURNS
) -> dict[str, float | None]:
    """Speed of two cores ÷ one core for encoding and decoding, and the same without waiting (``…_by_cpu``). None with
    only one core.
    """
    works: dict[str, Callable[[Work], None]] = {"encode": partial(encode_part, codec=codec), "decode": decode_part}
    if len(os.sched_getaffinity(0)) < 2:
        return {f"{name}_two_cores{how}": None for name in works for how in ("", "_by_cpu")}
    parts = work_of(*tiled(dataset, working_set_bytes), codec)
    found: dict[str, float | None] = {}
    for name, work in works.items():
        wall, cpu = _speedups(work, parts, turns)
        found |= {f"{name}_two_cores": round(wall, 4), f"{name}_two_cores_by_cpu": round(cpu, 4)}
    return found


def _speedups(work: Callable[[Work], None], parts: list[Work], turns: int) -> tuple[float, float]:
    """Ratios by wall time, and by CPU time, which busy cores do not falsify."""
    wall, cpu = {1: float("inf"), 2: float("inf")}, {1: float("inf"), 2: float("inf")}
    for _ in range(turns):
        for count in wall:
            begin, used = time.perf_counter(), time.process_time()
            for _ in ordered_map(work, parts, workers=count, name="bench"):
                pass
            wall[count] = min(wall[count], time.perf_counter() - begin)
            cpu[count] = min(cpu[count], time.process_time() - used)
    return wall[1] / wall[2], 2 * cpu[1] / cpu[2]
