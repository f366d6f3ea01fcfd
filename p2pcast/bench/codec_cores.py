"""Two cores beside one: the same cells by the map over threads that publishing and offline commands use (``parallel.ordered_map``).

One thread and two take turns in one run, and the quickest of many turns of each are compared: other programs can only make a turn slower. Wall time, since
what two threads wait for each other is to be seen. Threads are started anew in each turn, as for each version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from p2pcast.bench.codec import Dataset, Work, decode_part, encode_part, work_of
from p2pcast.parallel import ordered_map

WORKING_SET_BYTES = 128 << 20
"""Enough cells for both cores, few enough for turns that nobody disturbs."""
TURNS = 25


def two_cores(
    dataset: Dataset, codec: str, *, working_set_bytes: int = WORKING_SET_BYTES, turns: int = TURNS
) -> dict[str, float | None]:
    """How many times as fast two cores encode and decode as one does; None where there is but one."""
    if len(os.sched_getaffinity(0)) < 2:
        return {"encode_two_cores": None, "decode_two_cores": None}
    work = work_of(dataset, codec, working_set_bytes)
    return {
        "encode_two_cores": round(_speedup(partial(encode_part, codec=codec), work, turns), 4),
        "decode_two_cores": round(_speedup(decode_part, work, turns), 4),
    }


def _speedup(one: Callable[[Work], None], work: list[Work], turns: int) -> float:
    least = {1: float("inf"), 2: float("inf")}
    for _ in range(turns):
        for count in least:
            begin = time.perf_counter()
            for _ in ordered_map(one, work, workers=count, name="bench"):
                pass
            least[count] = min(least[count], time.perf_counter() - begin)
    return least[1] / least[2]
