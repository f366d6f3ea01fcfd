"""Links as `tc` commands, and links that no backend supports."""

from __future__ import annotations

import pytest

from netem.emulation.description import Bursts, Host, Link, Network, way
from netem.emulation.shaping import SLOTTED_S, shaping
from p2pcast.ground.errors import UsageError


def words(link: Link, rate_bps: float | None = 100e6) -> list[str]:
    lines = shaping("eth0", rate_bps, link, 0.05)
    assert all(line.startswith("qdisc add dev eth0 ") for line in lines)
    return [line.removeprefix("qdisc add dev eth0 ") for line in lines]


def test_a_rate_alone_is_a_bucket() -> None:
    (bucket,) = words(Link())
    assert bucket.startswith("root tbf rate 100000000bit")
    assert shaping("eth0", None, Link(), 0.05) == []


def test_delay_and_loss_are_netem_before_a_token_bucket() -> None:
    assert words(Link(delay_s=0.05, loss=0.01)) == [
        "root handle 1: netem limit 1000000 delay 49500us loss 1.000000% slot 500us 500us",
        "parent 1:1 handle 2: tbf rate 100000000bit burst 50000 limit 675000",
    ]
    assert words(Link(delay_s=0.05, jitter_s=0.002, reorder=0.1), None) == [
        "root handle 1: netem limit 1000000 delay 49500us 2000us reorder 10.000000% slot 500us 500us"
    ]
    assert words(Link(loss=Bursts(0.01, 0.3, 0.9, 0.001)), None) == [
        "root handle 1: netem limit 1000000 loss gemodel 1.000000% 30.000000% 90.000000% 0.100000%"
    ]


def test_a_short_delay_has_no_slots() -> None:
    assert "slot" not in words(Link(delay_s=0.9 * SLOTTED_S))[0]


def test_queue_limit_excludes_packets_in_flight() -> None:
    def limit(link: Link) -> str:
        return words(link)[-1]

    assert limit(Link(delay_s=0.15)) == limit(Link(delay_s=0.05))


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (Link(delay_s=-1), "delay"),
        (Link(delay_s=61), "delay"),
        (Link(delay_s=0.01, jitter_s=0.02), "jitter"),
        (Link(loss=1.5), "0 to 1"),
        (Link(loss=Bursts(2, 1)), "0 to 1"),
        (Link(loss=Bursts(0, 0)), "turning bad"),
        (Link(reorder=0.1), "needs a delay"),
        (Link(queue_s=0), "queue"),
    ],
)
def test_invalid_links_are_refused(link: Link, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Network((Host("a", link),))


def test_a_way_is_two_links() -> None:
    there = way([Link(up_bps=100e6, delay_s=0.01)], [Link(down_bps=200e6, delay_s=0.02, loss=Bursts(0.01, 0.99))])
    assert there.delay_s == pytest.approx(0.03)
    assert there.loss == pytest.approx(0.01)
    assert there.rate_bps == pytest.approx(99e6), "packets lost behind the narrowest link do not arrive"
    assert way([Link()], [Link()]).rate_bps is None
