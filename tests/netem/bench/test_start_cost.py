"""``bench start`` and ``bench relay --wide`` measure real processes: each figure is there, and of the right number."""

from __future__ import annotations

import os

from netem.bench.relay_cost import bench_wide
from netem.bench.start_cost import bench_start


def test_a_hub_is_back_with_its_versions() -> None:
    found = bench_start(1, 3)
    assert [len(found[name]) for name in ("listening_s", "ended_s", "back_s")] == [1, 1, 1]
    assert min(found["medians"].values()) > 0


def test_throughput_is_measured_for_each_number_of_cores() -> None:
    rows = bench_wide(8 << 20, 2, 1)["rows"]
    assert [row["cores"] for row in rows] == list(range(1, len(os.sched_getaffinity(0)) + 1))
    assert all(0 < row["loop_s_per_gb"] <= row["cpu_s_per_gb"] for row in rows)
