"""When a child leaves its parent, on a simulated clock."""

from __future__ import annotations

import pytest

from p2pcast.relay.parent_watch import ParentVerdict, ParentWatch
from p2pcast.relay.tuning import ALIVE_ACTIVE_S, IDLE_SILENCE_S, SILENCE_FLOOR_S, STALL_FLOOR_S

EVERY = ALIVE_ACTIVE_S


class Clock:
    """Judges the parent every 50 ms; ``seen`` says what the parent did in each interval."""

    def __init__(self, *, rtt_s: float | None = None):
        self.now = 100.0
        self.watch = ParentWatch.start(self.now)
        if rtt_s is not None:
            self.watch.ping_answered(rtt_s)
        self.held: dict[int, int] = {}

    def run(self, seconds: float, *, heard=False, paid=False, active=True) -> tuple[ParentVerdict, float]:
        """Run until a verdict other than STAY, or for the given seconds; returns the verdict and the seconds."""
        begin = self.now
        while self.now - begin < seconds - 1e-9:
            self.now += EVERY
            if heard or paid:
                self.watch.got_message(self.now, active=active)
            if paid:
                self.watch.got_payload(self.now)
            verdict = self.watch.judge(self.now, active=active, held=self.held, every_s=EVERY)
            if verdict is not ParentVerdict.STAY:
                return verdict, self.now - begin
        return ParentVerdict.STAY, self.now - begin


def test_silence_in_a_transfer_ends_the_link_soon():
    clock = Clock()
    assert clock.run(3, paid=True)[0] is ParentVerdict.STAY
    verdict, took = clock.run(3)
    assert verdict is ParentVerdict.SILENT
    assert SILENCE_FLOOR_S < took <= SILENCE_FLOOR_S + 2 * EVERY


def test_silence_without_a_transfer_ends_the_link_later():
    clock = Clock()
    verdict, took = clock.run(20, active=False)
    assert verdict is ParentVerdict.SILENT
    assert IDLE_SILENCE_S < took <= IDLE_SILENCE_S + 2 * EVERY
    clock = Clock()
    for _ in range(20):
        assert clock.run(1.0, active=False)[0] is ParentVerdict.STAY
        clock.watch.got_message(clock.now, active=False)


def test_a_far_parent_is_waited_for_before_its_first_message():
    """Before the first PONG, only the kernel's round trip from connecting is known."""
    clock = Clock()
    clock.watch = ParentWatch.start(clock.now, 0.3)
    verdict, took = clock.run(5)
    assert verdict is ParentVerdict.SILENT
    assert 1.2 < took <= 1.2 + 2 * EVERY


def test_far_parents_may_be_silent_for_four_round_trips():
    clock = Clock(rtt_s=0.3)
    verdict, took = clock.run(5)
    assert verdict is ParentVerdict.SILENT
    assert 1.2 < took <= 1.2 + 2 * EVERY


def test_the_longest_recent_gap_extends_the_allowed_silence():
    """After gaps of 200 ms a gap of 400 ms is allowed. After a smooth period the same gap is a failure."""
    clock = Clock()
    for _ in range(20):
        assert clock.run(0.2)[0] is ParentVerdict.STAY
        clock.watch.got_message(clock.now, active=True)
    assert clock.run(0.4)[0] is ParentVerdict.STAY
    clock.watch.got_message(clock.now, active=True)
    assert clock.run(10, paid=True)[0] is ParentVerdict.STAY
    verdict, took = clock.run(3)
    assert verdict is ParentVerdict.SILENT
    assert took <= SILENCE_FLOOR_S + 2 * EVERY


def test_jitter_extends_the_allowed_silence_to_four_floors_at_most():
    clock = Clock(rtt_s=1.0)
    for _ in range(20):
        assert clock.run(3.5)[0] is ParentVerdict.STAY
        clock.watch.got_message(clock.now, active=True)
    clock.watch.rtt_s = 0.0
    verdict, took = clock.run(10)
    assert verdict is ParentVerdict.SILENT
    assert took <= 4 * SILENCE_FLOOR_S + 2 * EVERY


def test_a_parent_that_is_ahead_and_sends_no_payload_has_stalled():
    clock = Clock()
    clock.watch.high, clock.held = {1: 10}, {1: 4}
    verdict, took = clock.run(5, heard=True)
    assert verdict is ParentVerdict.STALLED
    assert STALL_FLOOR_S < took <= STALL_FLOOR_S + 2 * EVERY


@pytest.mark.parametrize(
    ("high", "held"),
    [({1: 4}, {1: 4}), ({1: 3}, {1: 4}), ({}, {1: 4}), ({2: 0}, {1: 4})],
    ids=["level", "behind", "says nothing", "a handle not opened yet, and nothing to send"],
)
def test_a_parent_that_is_not_ahead_has_not_stalled(high, held):
    clock = Clock()
    clock.watch.high, clock.held = high, held
    assert clock.run(30, heard=True)[0] is ParentVerdict.STAY
    # The stall counts from the moment at which the parent is ahead.
    clock.watch.high, clock.held = {1: 10}, {1: 4}
    verdict, took = clock.run(5, heard=True)
    assert verdict is ParentVerdict.STALLED
    assert took > STALL_FLOOR_S


def test_pieces_of_an_unopened_artifact_count_as_ahead():
    """The parent stops sending before the first frame of a version."""
    clock = Clock()
    clock.watch.high, clock.held = {2: 10}, {1: 4}
    assert clock.run(5, heard=True)[0] is ParentVerdict.STALLED


def test_a_parent_that_sends_payload_is_kept():
    clock = Clock()
    clock.watch.high, clock.held = {1: 10}, {1: 4}
    assert clock.run(30, paid=True)[0] is ParentVerdict.STAY


def test_far_parents_may_stall_for_eight_round_trips():
    clock = Clock(rtt_s=0.5)
    clock.watch.high, clock.held = {1: 10}, {1: 4}
    verdict, took = clock.run(20, heard=True)
    assert verdict is ParentVerdict.STALLED
    assert took > 4.0


def test_time_that_this_nodes_event_loop_missed_does_not_count():
    clock = Clock()
    clock.run(1, paid=True)
    clock.watch.high, clock.held = {1: 10}, {1: 4}
    clock.now += 30.0
    assert clock.watch.judge(clock.now, active=True, held=clock.held, every_s=EVERY) is ParentVerdict.STAY
    verdict, took = clock.run(5)
    assert verdict is ParentVerdict.SILENT
    assert took > SILENCE_FLOOR_S - 3 * EVERY


def test_silence_does_not_count_while_this_node_does_not_read():
    clock = Clock()
    clock.watch.high, clock.held = {1: 10}, {1: 4}
    for _ in range(200):
        clock.now += EVERY
        clock.watch.ignore_silence(clock.now)
    verdict, took = clock.run(5)
    assert verdict is ParentVerdict.SILENT
    assert took > SILENCE_FLOOR_S


def test_round_trips_are_smoothed():
    watch = ParentWatch.start(0.0)
    watch.ping_answered(0.1)
    assert watch.rtt_s == 0.1
    watch.ping_answered(0.9)
    assert watch.rtt_s == pytest.approx(0.2)
