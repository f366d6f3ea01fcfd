"""Rates measured with a TCP stream."""

from __future__ import annotations

import pytest

from netem.emulation.description import EmulatedLink, EmulatedNetwork, star
from netem.emulation.namespaces import namespaces
from netem.emulation.streamed_rate import streamed, wire_share


def test_wire_share_subtracts_headers() -> None:
    assert wire_share(1500) == pytest.approx(1448 / 1514)


@pytest.mark.root
def test_streamed_rate_matches_link_and_deviation_is_reported() -> None:
    with namespaces(star(EmulatedLink(), 2, EmulatedLink(40e6, 60e6))) as net:
        found = streamed(net, [("hub", "p1"), ("p1", "hub"), ("hub", "hub")])
        assert found["off"] == []
        assert [row["asked_rate_bps"] for row in found["calibration"]] == [60e6, 40e6]
        made = net.network
        net.network = EmulatedNetwork(
            tuple(
                host if host.name == "hub" else type(host)(host.name, EmulatedLink(80e6, 80e6)) for host in made.hosts
            )
        )
        wrong = streamed(net, [("hub", "p1")], tries=1)
    assert [line.partition(" Mbit/s")[0].partition(":")[0] for line in wrong["off"]] == ["hub → p1"]
    assert "instead of 80.0 Mbit/s" in wrong["off"][0]
