"""A network is measured before use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netem.emulation.calibration import MeasuredPath, faults, loss_error, measure, rtt_error_s
from netem.emulation.description import Bursts, EmulatedLink, EmulatedNetwork, EmulatedPath, Host
from netem.emulation.namespaces import namespaces

GOOD = MeasuredPath("a", "b", EmulatedPath(100e6, 0.05, 0.01), 0.1, 98e6, 0.103, 0.011, 0.001)


def test_small_deviations_are_accepted() -> None:
    assert faults(GOOD) == []
    assert GOOD.document()["faults"] == []


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ({"rate_bps": 94e6}, "94.0 Mbit/s instead of 100.0"),
        ({"rate_bps": None}, "nothing came instead of 100.0"),
        ({"rtt_s": 0.106}, "a round trip of 106.0 ms instead of 100.0"),
        ({"rtt_s": None}, "no answer instead of 100.0"),
        ({"loss": 0.014}, "1.40% of packets lost instead of 1.00%"),
    ],
)
def test_deviations_are_reported(off: dict[str, float | None], said: str) -> None:
    (fault,) = faults(replace(GOOD, **off))
    assert said in fault


def test_jitter_is_no_proof_of_another_round_trip() -> None:
    error_s = rtt_error_s([EmulatedLink(delay_s=0.025, jitter_s=0.01), EmulatedLink()])
    assert 0.002 < error_s < 0.003
    off = replace(GOOD, rtt_s=0.1065)
    assert faults(off)
    assert faults(replace(off, rtt_error_s=error_s)) == []
    assert faults(replace(off, rtt_s=0.11, rtt_error_s=error_s))


def test_bursts_say_less_about_their_share() -> None:
    single, bursts = EmulatedLink(loss=0.01), EmulatedLink(loss=Bursts(0.001, 0.099))
    assert loss_error([single, EmulatedLink()], 0.01, 10_000) == pytest.approx(0.001, rel=0.01)
    assert loss_error([bursts, EmulatedLink()], 0.01, 10_000) > 4 * loss_error([single, EmulatedLink()], 0.01, 10_000)


@pytest.mark.root
def test_reshaped_kernel_link_is_measured() -> None:
    """The rate may be off on a busy machine; the packets must arrive and be counted."""
    with namespaces(EmulatedNetwork((Host("a"), Host("b", EmulatedLink(20e6, 20e6))))) as net:
        net.reshape("b", EmulatedLink(10e6, 10e6))
        net.reshape("a", EmulatedLink())
        back, there = measure(net, packets=500)
        assert (there.sender, there.receiver, back.sender) == ("a", "b", "b")
        assert there.asked == EmulatedPath(10e6, 0.0, 0.0)
        assert there.rate_bps is not None
        assert 0 < there.rate_bps < 11e6
        assert there.rtt_s is not None
        assert there.loss == 0
