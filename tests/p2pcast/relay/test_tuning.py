"""Constants that are derived from others, or from stated quantities, keep to their derivations."""

from __future__ import annotations

import math

from p2pcast.ground import limits
from p2pcast.relay import tuning as t
from p2pcast.store.write_behind import BACKLOG_HIGH_BYTES
from rollout_node.sync.downloader import SOURCES, TICK_S
from topology.pull_sources import PARTIAL, WHOLE
from trainer_node.hub import SILENCE_S

LONGEST_RTT_S = 0.3
"""Of the paths in docs/design/decisions/stripes.md."""
SLOWEST_BPS = 10e6
ORDINARY_BPS = 20e6
PROBE_GAIN, PHASES = 1.25, 8
"""Of BBR: in the probing phase, and the number of phases, of a round trip each."""
PACKET_BYTES = 1448


def test_a_rate_sample_tells_probes_and_pieces_under_way_from_a_faster_path() -> None:
    assert t.RAISE_MARGIN >= PROBE_GAIN
    assert t.RATE_SAMPLE_ROUND_TRIPS >= PHASES
    pieces = t.NARROW_BPS / 8 * t.RATE_SAMPLE_S / limits.PIECE_BYTES
    assert 2 / pieces < (t.RAISE_MARGIN - 1) / 4


def test_a_window_of_a_rate_holds_several_bursts() -> None:
    assert ORDINARY_BPS / 8 * t.RATE_WINDOW_S > 4 * t.BURST_BYTES


def test_a_healthy_hop_does_not_count_as_lagging() -> None:
    in_flight_s = t.NARROW_STRIPES * t.BURST_BYTES / (SLOWEST_BPS / 8)
    assert in_flight_s + t.ALIVE_ACTIVE_S < t.CATCH_UP_S
    assert t.CATCH_UP_ROUND_TRIPS > 1


def test_a_source_that_gives_way_is_not_silent() -> None:
    assert t.PULL_FLOOR_BYTES_S == (WHOLE + PARTIAL) * t.PULL_LEAST_BYTES_S
    assert t.PULL_LEAST_BYTES_S * t.PULL_STALL_S / PACKET_BYTES > 10
    assert t.PULL_STALL_S > 1 + 2, "two retransmissions of TCP"


def test_a_window_of_pulled_pieces_outlasts_all_delays() -> None:
    assert LONGEST_RTT_S + t.RATE_WINDOW_S + t.NEWS_S + TICK_S < t.PULL_WINDOW_S
    assert t.PULL_WINDOW_LEAST_BYTES >= ORDINARY_BPS / 8 * 0.1
    assert t.PULL_WINDOW_LEAST_BYTES >= t.PULL_WINDOW_LEAST_PIECES * limits.PIECE_BYTES
    assert t.PULL_WINDOW_MOST_BYTES <= BACKLOG_HIGH_BYTES
    assert t.PULL_LATE_S > 2 * LONGEST_RTT_S


def test_few_nodes_are_chosen_by_more_children_than_may_pull() -> None:
    chosen_by = (math.exp(-SOURCES) * SOURCES**n / math.factorial(n) for n in range(t.MAX_PULLS + 1))
    assert 1 - sum(chosen_by) < 1 / 5000


def test_a_failed_parent_is_left_within_a_second_and_a_late_keepalive_is_no_failure() -> None:
    assert 5 * t.ALIVE_ACTIVE_S <= t.SILENCE_FLOOR_S
    assert 5 * t.ALIVE_IDLE_S <= t.IDLE_SILENCE_S
    assert t.JITTER_FACTOR * t.SILENCE_FLOOR_S <= 1.0
    assert t.JITTER_DECAY ** (10 / t.ALIVE_ACTIVE_S) < 0.02
    assert limits.PIECE_BYTES / (SLOWEST_BPS / 8) < t.STALL_FLOOR_S
    assert t.IDLE_SILENCE_S == SILENCE_S
    assert 3 * SILENCE_S <= t.CHILD_SILENCE_S
    assert 8 * LONGEST_RTT_S / 2 < t.EXPECTED_S


def test_memory_serves_children_that_are_not_far_behind() -> None:
    assert 100e6 / 8 * t.FAR_BEHIND_S < t.CACHE_BYTES
    assert 4 * t.READ_AHEAD_BYTES <= t.CACHE_BYTES
    assert t.READ_AHEAD_PIECES * limits.PIECE_BYTES <= t.READ_AHEAD_BYTES


def test_a_squash_is_asked_for_only_if_asking_is_the_smaller_part() -> None:
    assert t.CATCH_UP_STEP_S == TICK_S
    assert LONGEST_RTT_S + TICK_S < t.SQUASH_LEAST_GAIN_S
