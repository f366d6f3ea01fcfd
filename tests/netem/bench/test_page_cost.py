"""``bench page`` measures a real hub and a real Chromium: each figure is there."""

from __future__ import annotations

from netem.bench.page_cost import bench_page


def test_each_figure_of_the_page_is_measured() -> None:
    found = bench_page(50, 2, 1.0, "/usr/bin/chromium")
    assert (found["peers"], found["viewers"]) == (50, 2)
    assert found.keys() >= {"idle_share", "viewed_share"}
    assert 0 < found["picture_bytes"] < 100_000
    assert found["chromium"].keys() == {"first_paint_s", "first_bytes", "second_paint_s", "second_bytes"}
    assert 0 < found["chromium"]["second_bytes"] < found["chromium"]["first_bytes"] < 200_000
