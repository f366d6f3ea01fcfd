"""``bench plays`` plays the same jobs both ways."""

from __future__ import annotations

from netem.bench.play_cost import bench_plays


def test_both_ways_of_a_turn_are_measured() -> None:
    found = bench_plays(64, 2, 1)
    assert (found["prompt_tokens"], found["at_once"]) == (64, 2)
    for way in ("here", "pool"):
        assert found[way].keys() == {"turn_ms", "worker_cpu_ms"}
        assert all(value > 0 for value in found[way].values())
