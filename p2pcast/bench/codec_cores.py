"""Two cores beside one: the same cells by the map over threads that publishing and offline commands use (``parallel.ordered_map``).

One thread and two take turns in one run, and the quickest of many turns of each are compared: other programs can only make a turn slower. Wall time, since
what two threads wait for each other is to be seen; it says nothing where other programs keep the cores busy. Threads are started anew in each turn, as for each version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from p2pcast.bench.codec import Dataset, Work, decode_part, encode_part, work_of
from p2pcast.parallel import ordered_map

WORKING_SET_BYTES = 256 << 20
"""Thirty cells or more: with ten, the last one alone would cost the second core a tenth."""
TURNS = 25


def two_cores(
    dataset: Dataset, codec: str, *, working_set_bytes: int = WORKING_SET_BYTES, turns: int = TURNS
) -> dict[str, float | None]:
    """How many times as fast two cores encode and decode as one does, and (``…_by_cpu``) would if no thread ever waited; None where there is but one core."""
    works: dict[str, Callable[[Work], None]] = {"encode": partial(encode_part, codec=codec), "decode": decode_part}
    if len(os.sched_getaffinity(0)) < 2:
        return {f"{name}_two_cores{how}": None for name in works for how in ("", "_by_cpu")}
    parts = work_of(dataset, codec, working_set_bytes)
    found: dict[str, float | None] = {}
    for name, work in works.items():
        wall, cpu = _speedups(work, parts, turns)
        found |= {f"{name}_two_cores": round(wall, 4), f"{name}_two_cores_by_cpu": round(cpu, 4)}
    return found


def _speedups(work: Callable[[Work], None], parts: list[Work], turns: int) -> tuple[float, float]:
    """By wall time; by CPU time, which busy cores do not falsify."""
    wall, cpu = {1: float("inf"), 2: float("inf")}, {1: float("inf"), 2: float("inf")}
    for _ in range(turns):
        for count in wall:
            begin, used = time.perf_counter(), time.process_time()
            for _ in ordered_map(work, parts, workers=count, name="bench"):
                pass
            wall[count] = min(wall[count], time.perf_counter() - begin)
            cpu[count] = min(cpu[count], time.process_time() - used)
    return wall[1] / wall[2], 2 * cpu[1] / cpu[2]
