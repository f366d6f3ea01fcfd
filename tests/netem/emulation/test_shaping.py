"""Links as `tc` commands, and links that no backend supports."""

from __future__ import annotations

import pytest

from netem.emulation.description import Bursts, EmulatedLink, EmulatedNetwork, Host, way
from netem.emulation.shaping import SLOTTED_S, shaping
from p2pcast.ground.errors import UsageError


def words(link: EmulatedLink, rate_bps: float | None = 100e6) -> list[str]:
    lines = shaping("eth0", rate_bps, link, 0.05)
    assert all(line.startswith("qdisc add dev eth0 ") for line in lines)
    return [line.removeprefix("qdisc add dev eth0 ") for line in lines]


def test_a_rate_alone_is_a_bucket() -> None:
    (bucket,) = words(EmulatedLink())
    assert bucket.startswith("root tbf rate 100000000bit")
    assert shaping("eth0", None, EmulatedLink(), 0.05) == []


def test_delay_and_loss_are_netem_before_a_token_bucket() -> None:
    assert words(EmulatedLink(delay_s=0.05, loss=0.01)) == [
        "root handle 1: netem limit 1000000 delay 49500us loss 1.000000% slot 500us 500us",
        "parent 1:1 handle 2: tbf rate 100000000bit burst 50000 limit 675000",
    ]
    assert words(EmulatedLink(delay_s=0.05, jitter_s=0.002, reorder=0.1), None) == [
        "root handle 1: netem limit 1000000 delay 49500us 2000us reorder 10.000000% slot 500us 500us"
    ]
    assert words(EmulatedLink(loss=Bursts(0.01, 0.3, 0.9, 0.001)), None) == [
        "root handle 1: netem limit 1000000 loss gemodel 1.000000% 30.000000% 90.000000% 0.100000%"
    ]


def test_a_short_delay_has_no_slots() -> None:
    assert "slot" not in words(EmulatedLink(delay_s=0.9 * SLOTTED_S))[0]


def test_queue_limit_excludes_packets_in_flight() -> None:
    def limit(link: EmulatedLink) -> str:
        return words(link)[-1]

    assert limit(EmulatedLink(delay_s=0.15)) == limit(EmulatedLink(delay_s=0.05))


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (EmulatedLink(delay_s=-1), "delay"),
        (EmulatedLink(delay_s=61), "delay"),
        (EmulatedLink(delay_s=0.01, jitter_s=0.02), "jitter"),
        (EmulatedLink(loss=1.5), "0 to 1"),
        (EmulatedLink(loss=Bursts(2, 1)), "0 to 1"),
        (EmulatedLink(loss=Bursts(0, 0)), "turning bad"),
        (EmulatedLink(reorder=0.1), "needs a delay"),
        (EmulatedLink(queue_s=0), "queue"),
    ],
)
def test_invalid_links_are_refused(link: EmulatedLink, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        EmulatedNetwork((Host("a", link),))


def test_a_way_is_two_links() -> None:
    there = way(
        [EmulatedLink(up_bps=100e6, delay_s=0.01)],
        [EmulatedLink(down_bps=200e6, delay_s=0.02, loss=Bursts(0.01, 0.99))],
    )
    assert there.delay_s == pytest.approx(0.03)
    assert there.loss == pytest.approx(0.01)
    assert there.rate_bps == pytest.approx(99e6), "packets lost behind the narrowest link do not arrive"
    assert way([EmulatedLink()], [EmulatedLink()]).rate_bps is None
