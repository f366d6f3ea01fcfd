"""The model of time is that of a pipeline played out step by step, and choices follow it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.codec.choice import (
    MEASURED_BEFORE,
    Cost,
    State,
    Way,
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
EIGHT_B = State(16_000_000_000, CELL)


def played(stages_s: list[float], cells: int) -> float:
    """When the last cell leaves the last stage; one cell at a time in each."""
    free = [0.0] * len(stages_s)
    for _ in range(cells):
        at = 0.0
        for stage, takes_s in enumerate(stages_s):
            at = free[stage] = max(at, free[stage]) + takes_s
    return free[-1]


@given(cost=COSTS, link=LINKS, cells=st.integers(1, 60))
def test_a_core_a_stage_is_a_pipeline_played_out(cost, link, cells):
    times = predict(cost, Way(link, 1, 1, proof=False), State(cells * CELL, CELL))
    stages = [CELL / cost.encode_bytes_s, 8 * CELL * cost.share / link, CELL / cost.decode_bytes_s]
    assert times.whole_s == pytest.approx(played(stages, cells))


@given(cost=COSTS, link=LINKS, cores=st.integers(1, 64), cells=st.integers(1, 500), proof=st.booleans())
def test_overlap_never_costs_and_no_stage_is_skipped(cost, link, cores, cells, proof):
    state, way = State(cells * CELL, CELL), Way(link, cores, cores, proof)
    times = predict(cost, way, state)
    stages_s = (times.encode_s, times.transfer_s, times.decode_s)
    assert max(stages_s) <= times.whole_s <= sum(stages_s) * (1 + 1e-9)
    faster = predict(cost, replace(way, link_bps=2 * link), state)
    more_cores = predict(cost, replace(way, encode_cores=2 * cores, decode_cores=2 * cores), state)
    assert max(faster.whole_s, more_cores.whole_s) <= times.whole_s * (1 + 1e-9)


def test_one_cell_is_the_work_of_one_core():
    cost = Cost(1e9, 1e9, 0.01)
    one = State(CELL, CELL)
    assert predict(cost, Way(1e9, 64, 64, proof=False), one) == predict(cost, Way(1e9, 1, 1, proof=False), one)


def test_who_proves_what_it_sends_decodes_it_too():
    cost, way = Cost(2e9, 1e9, 0.001), Way(100e9, 4, 64, proof=True)
    assert predict(cost, way, EIGHT_B).encode_s == pytest.approx((8 + 16) / 4)
    assert predict(cost, replace(way, proof=False), EIGHT_B).encode_s == pytest.approx(8 / 4)


def test_nothing_takes_no_time():
    assert predict(Cost(1, 1, 1), Way(1, 1, 1), State(0, CELL)).whole_s == 0


def test_slow_links_get_the_smallest_fast_ones_the_quickest():
    assert choose(MEASURED_BEFORE, Way(0.4e9, 16, 16), EIGHT_B).codec == "context"
    assert choose(MEASURED_BEFORE, Way(100e9, 16, 16), EIGHT_B).codec == "flat"


def test_dense_where_everything_has_changed():
    costs = {"context": Cost(0.05e9, 0.05e9, 1.1), "flat": Cost(0.1e9, 0.1e9, 1.2), "dense": Cost(0.3e9, 0.8e9, 0.67)}
    assert choose(costs, Way(1e9, 16, 16), EIGHT_B).codec == "dense"


def test_a_peer_of_few_cores_turns_the_choice():
    way = Way(1e9, 64, 64, proof=False)
    assert choose(MEASURED_BEFORE, way, EIGHT_B).codec == "context"
    assert choose(MEASURED_BEFORE, replace(way, decode_cores=2), EIGHT_B).codec == "flat"


def test_of_equals_the_one_with_fewer_bytes():
    costs = {"large": Cost(1e6, 1e6, 0.02), "small": Cost(1e6, 1e6, 0.01)}
    assert choose(costs, Way(math.inf, 1, 1), EIGHT_B).codec == "small"


@given(costs=st.lists(COSTS, min_size=1, max_size=4), link=LINKS, cells=st.integers(0, 500))
def test_the_fewest_bytes_win_among_those_that_take_hardly_longer(costs, link, cells):
    named, way, state = {str(n): cost for n, cost in enumerate(costs)}, Way(link, 4, 16), State(cells * CELL, CELL)
    made = choose(named, way, state)
    times_s = {name: predict(cost, way, state).whole_s for name, cost in named.items()}
    best_s = min(times_s.values())
    assert times_s[made.codec] <= max(1.15 * best_s, 0.05)
    assert all(named[made.codec].share <= named[n].share for n, s in times_s.items() if s <= max(1.15 * best_s, 0.05))


def test_a_choice_against_the_clock_says_why():
    made = choose(MEASURED_BEFORE, Way(100e9, 16, 16), State(CELL, CELL))
    assert made.codec == "context"
    assert made.why.startswith("flat")
    assert "context takes fewer bytes" in made.why


def test_why_names_every_codec_and_the_way():
    said = choose(MEASURED_BEFORE, Way(100e6, 4, 16), EIGHT_B).why
    for part in ("context ", "flat ", "dense ", "100 Mbit/s", "4 cores here", "16 there"):
        assert part in said
    assert said.startswith("context")


@given(small=COSTS, quick=COSTS, cores=st.integers(1, 64))
def test_at_the_crossover_both_take_as_long(small, quick, cores):
    if small.share > quick.share:
        small, quick = quick, small
    way = Way(1e9, cores, cores)
    bps = crossover_bps(small, quick, way, EIGHT_B)
    if math.isfinite(bps) and bps > 0:
        at = replace(way, link_bps=bps)
        assert sequential_s(small, at, EIGHT_B) == pytest.approx(sequential_s(quick, at, EIGHT_B))
    below, above = replace(way, link_bps=max(bps, 1e-300) * 0.9), replace(way, link_bps=bps * 1.1)
    if bps > 0 and math.isfinite(bps):
        assert sequential_s(small, below, EIGHT_B) <= sequential_s(quick, below, EIGHT_B) * (1 + 1e-9)
        assert sequential_s(small, above, EIGHT_B) >= sequential_s(quick, above, EIGHT_B) * (1 - 1e-9)


def test_pulse_by_its_own_figures():
    """Appendix E.4.3 and E.4.5: of a sparse payload of 194 MB, zstd-1 before lz4 up to some 800 Mbit/s."""
    state, way = State(194_000_000, CELL), Way(1, 1, 1, proof=False)
    zstd, lz4 = Cost(534e6, 851e6, 1 / 3.33), Cost(830e6, 1484e6, 1 / 2.40)
    assert crossover_bps(zstd, lz4, way, state) == pytest.approx(800e6, rel=0.2)


def test_overlapped_crossover_parts_the_rates():
    small, quick, way = MEASURED_BEFORE["context"], MEASURED_BEFORE["flat"], Way(1, 16, 16)
    bps = overlapped_crossover_bps(small, quick, way, EIGHT_B)
    for factor in (0.99, 1.01):
        at = replace(way, link_bps=bps * factor)
        assert (predict(small, at, EIGHT_B).whole_s < predict(quick, at, EIGHT_B).whole_s) == (factor < 1)
        assert choose({"context": small, "flat": quick}, at, EIGHT_B).codec == "context", "as good as equal, in fewer bytes"
    assert overlapped_crossover_bps(quick, quick, way, EIGHT_B) == math.inf
    assert overlapped_crossover_bps(replace(small, share=quick.share), quick, way, EIGHT_B) == 0
