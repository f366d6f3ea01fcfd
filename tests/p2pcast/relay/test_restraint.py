"""A link over a way whose queue it overruns is held, and let go again. Ways are numbers here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.relay.restraint import ENOUGH, LEFT_ALONE, LITTLE, MEASURED, MUCH, NARROW_BPS, STRIKES, TELLING_S, Restraint
from p2pcast.relay.smoothing import UNHELD_BYTES_S
from p2pcast.transport.tcp_info import TcpInfo

WAY = 1_000_000.0
"""Bytes a second."""
EAGER = 1.2
"""What is sent by itself, times what the way carries: a sixth is lost."""


def said(busy_s: float, through: float, sent: float, again: float, rtt_s: float = 0.1) -> TcpInfo:
    """By the kernel, of one stripe."""
    return TcpInfo(rtt_s, rtt_s, 10, 1, 0, 0, int(sent), int(again), 0.0, busy_s, delivered_packets=int(through))


class Way:
    """Four stripes that always have something to send: over a way that carries so much, and loses ``chance`` of all."""

    def __init__(self, carries: float = WAY, chance: float = 0.0, rtt_s: float = 0.1, eager: float = EAGER) -> None:
        self.restraint, self.carries, self.chance, self.rtt_s, self.eager = Restraint(), carries, chance, rtt_s, eager
        self.at_s = self.sent = self.again = self.acked = 0.0

    def go(self, for_s: float) -> list[float | None]:
        """To what it was held, a look every quarter of a second."""
        held = []
        for _ in range(int(for_s * 4)):
            most = self.restraint.most_bytes_s
            sent = min(self.eager * self.carries, most or UNHELD_BYTES_S) * 0.25
            through = min(sent * (1 - self.chance), self.carries * 0.25)
            self.at_s += 0.25
            self.sent, self.acked, self.again = self.sent + sent, self.acked + through, self.again + sent - through
            self.restraint.look([said(self.at_s, self.acked / 4, self.sent / 4, self.again / 4, self.rtt_s)] * 4)
            held.append(self.restraint.most_bytes_s)
        return held


def test_a_way_that_loses_little_is_left_alone() -> None:
    assert set(Way(chance=LITTLE, eager=0.9).go(60)) == {None}


def test_a_queue_that_is_overrun_is_not_for_long() -> None:
    way = Way()
    held = way.go(60)
    assert held[-1] is not None
    assert 0.97 * WAY < held[-1] < 1.1 * WAY
    before = way.again, way.sent
    way.go(60)
    assert (way.again - before[0]) / (way.sent - before[1]) < MUCH


def test_a_way_that_comes_to_carry_more_is_followed() -> None:
    way = Way()
    way.go(20)
    way.carries = 3 * WAY
    held = way.go(60)
    assert held[-1] is not None
    assert held[-1] >= 2.9 * WAY


def test_a_way_that_comes_to_carry_less_is_followed() -> None:
    way = Way()
    way.go(20)
    way.carries = WAY / 3
    held = way.go(2 * MEASURED * TELLING_S)
    assert held[-1] is not None
    assert held[-1] < EAGER * WAY / 3


def test_loss_that_is_the_way_s_own_is_left_to_the_kernel() -> None:
    held = Way(chance=2 * MUCH, eager=0.9).go(2 * STRIKES * TELLING_S)
    assert UNHELD_BYTES_S in held, "held for a while, in vain"
    at = held.index(UNHELD_BYTES_S)
    assert set(held[at : at + LEFT_ALONE]) == {UNHELD_BYTES_S}, "and again only much later"


def test_wide_ways_are_left_alone() -> None:
    assert set(Way(carries=NARROW_BPS / 8).go(60)) == {None}


def test_far_ways_are_measured_for_longer() -> None:
    near, far = Way(rtt_s=0.05), Way(rtt_s=0.4)
    first = [next(i for i, each in enumerate(way.go(20)) if each is not None) for way in (near, far)]
    assert first[1] >= 2 * first[0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 10**7), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=60))
def test_whatever_the_kernel_says(looks) -> None:
    restraint, busy_s, sums = Restraint(), 0.0, [0, 0, 0]
    for seconds, *more in looks:
        busy_s += seconds / 4
        sums = [a + b for a, b in zip(sums, more, strict=True)]
        restraint.look([said(busy_s, *sums)] * (1 + seconds % 2))
        assert restraint.most_bytes_s is None or 0 <= restraint.most_bytes_s <= UNHELD_BYTES_S


def test_stripes_that_come_into_use_begin_a_new_measurement() -> None:
    restraint = Restraint()
    one, lost, *more = (said(n, n * 10**5, 2 * n * 10**5, n * 10**5) for n in range(ENOUGH + 1))
    restraint.look([one])
    restraint.look([lost, lost])
    restraint.look([lost])
    assert restraint.most_bytes_s is None
    restraint = Restraint()
    for each in (one, lost, *more):
        assert restraint.most_bytes_s is None, "a few measurements say little"
        restraint.look([each, each])
    assert restraint.most_bytes_s == pytest.approx(2 * 10**5)
