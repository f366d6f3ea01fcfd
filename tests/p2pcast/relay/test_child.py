"""Which of a child's stripes takes the next burst, and how fast each may send."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from p2pcast.relay.child import FAR_S, TRAIL_ROUND_TRIPS, Child
from p2pcast.relay.smoothing import HEADROOM, Inflow
from p2pcast.transport.link import Link, QuietOwner


@dataclass(eq=False)
class Lane:
    number: int
    unsent_bytes: int = 0
    writable: bool = True
    rate: int | None = None
    closed: bool = False

    def pace(self, rate: int | None) -> None:
        self.rate = rate


def child_of(*lanes: Lane, in_use: int | None = None) -> Child:
    link = Link(QuietOwner(), b"c" * 16, "child", len(lanes))
    link.stripes = {lane.number: lane for lane in lanes}
    link.in_use = len(lanes) if in_use is None else in_use
    return Child(link, 0.0, live=True)


@pytest.mark.parametrize(
    ("unsent", "found"),
    [
        ((0, 0, 0), 0),
        ((9, 0, 0), 1),
        ((9, 5, 7), 1),
        ((9, None, 7), 2),
        ((None, None, None), None),
        ((0, None, None), 0),
    ],
)
def test_the_next_burst_goes_where_the_least_waits(unsent, found) -> None:
    child = child_of(*(Lane(n, count or 0, count is not None) for n, count in enumerate(unsent)))
    stripe = child.emptiest()
    assert (None if stripe is None else stripe.number) == found


def test_the_first_stripe_of_one_that_pulls_carries_no_pieces_and_those_not_in_use_none_either() -> None:
    child = child_of(Lane(0), Lane(1, 5), Lane(2), in_use=2)
    child.feeds.apart = True
    assert child.emptiest().number == 1


def test_a_limit_is_for_all_stripes_in_use_together() -> None:
    lanes = [Lane(n) for n in range(8)]
    child, inflow = child_of(*lanes, in_use=4), Inflow()
    child.searching = True
    child.hold(inflow)
    assert {lane.rate for lane in lanes} == {None}, "nothing is known"
    inflow.came(2_000_000, 2.0)
    child.hold(inflow)
    assert {lane.rate for lane in lanes} == {int(HEADROOM * 1e6 / 4)}
    child.live, child.link.in_use = False, 2
    child.hold(inflow)
    assert {lane.rate for lane in lanes} == {int(HEADROOM * 1e6 / 4)}, "who pulls is held by other rules"


def test_where_loss_holds_each_stripe_back_none_is_given_a_share() -> None:
    lanes = [Lane(0), Lane(1)]
    child, inflow = child_of(*lanes), Inflow()
    inflow.came(2_000_000, 2.0)
    child.hold(inflow)
    assert {lane.rate for lane in lanes} == {int(HEADROOM * 1e6)}


def test_on_long_ways_stripes_are_reminded_of_while_their_last_packets_may_be_missing() -> None:
    done, busy, gone = lanes = Lane(0), Lane(1, unsent_bytes=9), Lane(2, closed=True)
    child = child_of(*lanes)
    child.rtt_s, child.carried = 0.2, dict.fromkeys(lanes, 10.0)
    assert child.trailing(10.1) == [done]
    assert set(child.carried) == {done, busy}
    busy.unsent_bytes = 0
    assert child.trailing(10.0 + 0.9 * TRAIL_ROUND_TRIPS * child.rtt_s) == [done, busy]
    assert child.trailing(10.1 + TRAIL_ROUND_TRIPS * child.rtt_s) == []
    assert child.carried == {}
    assert gone.closed


def test_on_short_ways_the_kernel_is_soon_enough() -> None:
    lane = Lane(0)
    child = child_of(lane)
    child.rtt_s, child.carried = 0.9 * FAR_S, {lane: 10.0}
    assert child.trailing(10.01) == []
