"""Which of a child's stripes takes the next burst, and how fast each may send."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from p2pcast.relay.child import Child
from p2pcast.relay.pacing import InboundRate
from p2pcast.relay.tuning import FAR_RTT_S, PACED_RTT_S, PACING_HEADROOM, REMINDER_ROUND_TRIPS, UNPACED_BYTES_S
from p2pcast.transport.link import Link, QuietOwner


@dataclass(eq=False)
class FakeStripe:
    number: int
    unsent_bytes: int = 0
    writable: bool = True
    rate: int | None = None
    closed: bool = False

    def pace(self, rate: int | None) -> None:
        self.rate = rate


def child_of(*stripes: FakeStripe, in_use: int | None = None) -> Child:
    link = Link(QuietOwner(), b"c" * 16, "child", len(stripes))
    link.stripes = {stripe.number: stripe for stripe in stripes}
    link.in_use = len(stripes) if in_use is None else in_use
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
def test_the_next_burst_goes_to_the_stripe_with_the_fewest_unsent_bytes(unsent, found) -> None:
    child = child_of(*(FakeStripe(n, count or 0, count is not None) for n, count in enumerate(unsent)))
    stripe = child.emptiest()
    assert (None if stripe is None else stripe.number) == found


def test_pieces_avoid_unused_stripes_and_the_first_stripe_of_a_pulling_child() -> None:
    child = child_of(FakeStripe(0), FakeStripe(1, 5), FakeStripe(2), in_use=2)
    child.schedules.apart = True
    assert child.emptiest().number == 1


def test_with_bbr_the_stripes_in_use_share_one_rate_limit() -> None:
    stripes = [FakeStripe(n) for n in range(8)]
    child, inbound = child_of(*stripes, in_use=4), InboundRate()
    child.loss_blind, child.path_rtt_s = True, PACED_RTT_S
    child.pace(inbound)
    assert {stripe.rate for stripe in stripes} == {None}, "no inbound rate is known yet"
    inbound.add(2_000_000, 2.0)
    child.pace(inbound)
    assert {stripe.rate for stripe in stripes} == {int(PACING_HEADROOM * 1e6 / 4)}
    child.live, child.link.in_use = False, 2
    child.pace(inbound)
    assert {stripe.rate for stripe in stripes} == {int(PACING_HEADROOM * 1e6 / 4)}, (
        "the pull throttle limits a child that pulls"
    )


def test_a_path_that_turns_out_to_be_near_is_not_paced_any_longer() -> None:
    stripe = FakeStripe(0)
    child, inbound = child_of(stripe), InboundRate()
    inbound.add(2_000_000, 2.0)
    child.path_rtt_s = PACED_RTT_S
    child.pace(inbound)
    assert stripe.rate == int(PACING_HEADROOM * 1e6)
    child.path_rtt_s = 0.001
    child.pace(inbound)
    assert stripe.rate == UNPACED_BYTES_S


def test_without_bbr_each_stripe_gets_the_whole_rate_limit() -> None:
    stripes = [FakeStripe(0), FakeStripe(1)]
    child, inbound = child_of(*stripes), InboundRate()
    child.path_rtt_s = PACED_RTT_S
    inbound.add(2_000_000, 2.0)
    child.pace(inbound)
    assert {stripe.rate for stripe in stripes} == {int(PACING_HEADROOM * 1e6)}


def test_on_long_paths_a_stripe_gets_reminders_while_its_last_packets_may_be_lost() -> None:
    done, busy, gone = stripes = FakeStripe(0), FakeStripe(1, unsent_bytes=9), FakeStripe(2, closed=True)
    child = child_of(*stripes)
    child.rtt_s, child.path_rtt_s, child.carried = 0.2, 0.2, dict.fromkeys(stripes, 10.0)
    assert child.trailing(10.1) == [done]
    assert set(child.carried) == {done, busy}
    busy.unsent_bytes = 0
    assert child.trailing(10.0 + 0.9 * REMINDER_ROUND_TRIPS * child.rtt_s) == [done, busy]
    assert child.trailing(10.1 + REMINDER_ROUND_TRIPS * child.rtt_s) == []
    assert child.carried == {}
    assert gone.closed


def test_on_short_paths_no_stripe_gets_reminders() -> None:
    stripe = FakeStripe(0)
    child = child_of(stripe)
    child.rtt_s, child.path_rtt_s, child.carried = 0.2, 0.9 * FAR_RTT_S, {stripe: 10.0}
    assert child.trailing(10.01) == []
