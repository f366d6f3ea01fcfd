"""The time model equals a simulated pipeline, and choices follow the model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.codec.codec_prediction import (
    MEASURED_BEFORE,
    BroadcastPath,
    Cost,
    StateSize,
    choose,
    crossover_bps,
    overlapped_crossover_bps,
    predict,
    sequential_s,
)

RATES = st.floats(1e6, 1e11)
COSTS = st.builds(Cost, RATES, RATES, st.floats(0.0001, 2))
LINKS = st.floats(1e5, 1e12)
CELL = 8 << 20
EIGHT_B = StateSize(16_000_000_000, CELL)


def simulate_pipeline(stages_s: list[float], cells: int) -> float:
    """Seconds until the last cell leaves the last stage; each stage handles one cell at a time."""
    free = [0.0] * len(stages_s)
    for _ in range(cells):
        at = 0.0
        for stage, takes_s in enumerate(stages_s):
            at = free[stage] = max(at, free[stage]) + takes_s
    return free[-1]


@given(cost=COSTS, link=LINKS, cells=st.integers(1, 60))
def test_one_core_per_stage_matches_a_simulated_pipeline(cost, link, cells):
    times = predict(cost, BroadcastPath(link, 1, 1, proof=False), StateSize(cells * CELL, CELL))
    stages = [CELL / cost.encode_bytes_s, 8 * CELL * cost.share / link, CELL / cost.decode_bytes_s]
    assert times.whole_s == pytest.approx(simulate_pipeline(stages, cells))


@given(cost=COSTS, link=LINKS, cores=st.integers(1, 64), cells=st.integers(1, 500), proof=st.booleans())
def test_whole_time_lies_between_slowest_stage_and_sum(cost, link, cores, cells, proof):
    state, way = StateSize(cells * CELL, CELL), BroadcastPath(link, cores, cores, proof)
    times = predict(cost, way, state)
    stages_s = (times.encode_s, times.transfer_s, times.decode_s)
    assert max(stages_s) <= times.whole_s <= sum(stages_s) * (1 + 1e-9)
    faster = predict(cost, replace(way, link_bps=2 * link), state)
    more_cores = predict(cost, replace(way, encode_cores=2 * cores, decode_cores=2 * cores), state)
    assert max(faster.whole_s, more_cores.whole_s) <= times.whole_s * (1 + 1e-9)


def test_one_cell_uses_one_core():
    cost = Cost(1e9, 1e9, 0.01)
    one = StateSize(CELL, CELL)
    assert predict(cost, BroadcastPath(1e9, 64, 64, proof=False), one) == predict(
        cost, BroadcastPath(1e9, 1, 1, proof=False), one
    )


def test_proof_adds_decoding_to_encoding():
    cost, way = Cost(2e9, 1e9, 0.001), BroadcastPath(100e9, 4, 64, proof=True)
    assert predict(cost, way, EIGHT_B).encode_s == pytest.approx((8 + 16) / 4)
    assert predict(cost, replace(way, proof=False), EIGHT_B).encode_s == pytest.approx(8 / 4)


def test_empty_state_takes_no_time():
    assert predict(Cost(1, 1, 1), BroadcastPath(1, 1, 1), StateSize(0, CELL)).whole_s == 0


def test_slow_links_get_the_smallest_codec_and_fast_links_the_fastest():
    assert choose(MEASURED_BEFORE, BroadcastPath(0.4e9, 16, 16), EIGHT_B).codec == "context"
    assert choose(MEASURED_BEFORE, BroadcastPath(100e9, 16, 16), EIGHT_B).codec == "flat"


def test_dense_is_chosen_if_everything_changed():
    costs = {"context": Cost(0.05e9, 0.05e9, 1.1), "flat": Cost(0.1e9, 0.1e9, 1.2), "dense": Cost(0.3e9, 0.8e9, 0.67)}
    assert choose(costs, BroadcastPath(1e9, 16, 16), EIGHT_B).codec == "dense"


def test_few_peer_cores_change_the_choice():
    way = BroadcastPath(1e9, 64, 64, proof=False)
    assert choose(MEASURED_BEFORE, way, EIGHT_B).codec == "context"
    assert choose(MEASURED_BEFORE, replace(way, decode_cores=2), EIGHT_B).codec == "flat"


def test_ties_go_to_fewer_bytes():
    costs = {"large": Cost(1e6, 1e6, 0.02), "small": Cost(1e6, 1e6, 0.01)}
    assert choose(costs, BroadcastPath(math.inf, 1, 1), EIGHT_B).codec == "small"


@given(costs=st.lists(COSTS, min_size=1, max_size=4), link=LINKS, cells=st.integers(0, 500))
def test_fewest_bytes_win_within_the_slack(costs, link, cells):
    named, way, state = (
        {str(n): cost for n, cost in enumerate(costs)},
        BroadcastPath(link, 4, 16),
        StateSize(cells * CELL, CELL),
    )
    made = choose(named, way, state)
    times_s = {name: predict(cost, way, state).whole_s for name, cost in named.items()}
    best_s = min(times_s.values())
    assert times_s[made.codec] <= max(1.15 * best_s, 0.05)
    assert all(named[made.codec].share <= named[n].share for n, s in times_s.items() if s <= max(1.15 * best_s, 0.05))


def test_choice_of_a_slower_codec_states_its_reason():
    made = choose(MEASURED_BEFORE, BroadcastPath(100e9, 16, 16), StateSize(CELL, CELL))
    assert made.codec == "context"
    assert made.why.startswith("flat")
    assert "context takes fewer bytes" in made.why


def test_reason_names_every_codec_and_the_path():
    said = choose(MEASURED_BEFORE, BroadcastPath(100e6, 4, 16), EIGHT_B).why
    for part in ("context ", "flat ", "dense ", "100 Mbit/s", "4 cores at the trainer", "16 at the peer"):
        assert part in said
    assert said.startswith("context")


@given(small=COSTS, quick=COSTS, cores=st.integers(1, 64))
def test_both_codecs_take_equal_time_at_the_crossover(small, quick, cores):
    if small.share > quick.share:
        small, quick = quick, small
    way = BroadcastPath(1e9, cores, cores)
    bps = crossover_bps(small, quick, way, EIGHT_B)
    if math.isfinite(bps) and bps > 0:
        at = replace(way, link_bps=bps)
        assert sequential_s(small, at, EIGHT_B) == pytest.approx(sequential_s(quick, at, EIGHT_B))
    below, above = replace(way, link_bps=max(bps, 1e-300) * 0.9), replace(way, link_bps=bps * 1.1)
    if bps > 0 and math.isfinite(bps):
        assert sequential_s(small, below, EIGHT_B) <= sequential_s(quick, below, EIGHT_B) * (1 + 1e-9)
        assert sequential_s(small, above, EIGHT_B) >= sequential_s(quick, above, EIGHT_B) * (1 - 1e-9)


def test_crossover_matches_pulse_figures():
    """Appendix E.4.3 and E.4.5: for a sparse payload of 194 MB, zstd-1 beats lz4 up to about 800 Mbit/s."""
    state, way = StateSize(194_000_000, CELL), BroadcastPath(1, 1, 1, proof=False)
    zstd, lz4 = Cost(534e6, 851e6, 1 / 3.33), Cost(830e6, 1484e6, 1 / 2.40)
    assert crossover_bps(zstd, lz4, way, state) == pytest.approx(800e6, rel=0.2)


def test_overlapped_crossover_separates_the_rates():
    small, quick, way = MEASURED_BEFORE["context"], MEASURED_BEFORE["flat"], BroadcastPath(1, 16, 16)
    bps = overlapped_crossover_bps(small, quick, way, EIGHT_B)
    for factor in (0.99, 1.01):
        at = replace(way, link_bps=bps * factor)
        assert (predict(small, at, EIGHT_B).whole_s < predict(quick, at, EIGHT_B).whole_s) == (factor < 1)
        assert choose({"context": small, "flat": quick}, at, EIGHT_B).codec == "context", (
            "as good as equal, in fewer bytes"
        )
    assert overlapped_crossover_bps(quick, quick, way, EIGHT_B) == math.inf
    assert overlapped_crossover_bps(replace(small, share=quick.share), quick, way, EIGHT_B) == 0
