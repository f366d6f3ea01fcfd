"""Networks with regions: the path between two hosts, the choice of measurements, and real switches, trunks
and faults.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from netem.emulation.calibration import Pair, batches, gauge_of, measure, pairs, with_gauges
from netem.emulation.description import Bursts, EmulatedLink, EmulatedNetwork, EmulatedPath, Host, Region
from netem.emulation.namespaces import Namespaces, namespaces
from p2pcast.ground.errors import UsageError

TRUNK = EmulatedLink(10e6, 5e6, 0.04, loss=0.01)
NARROW = EmulatedLink(8e6, 8e6)
NETWORK = EmulatedNetwork(
    (
        Host("hub"),
        Host("e1", NARROW, "east"),
        Host("e2", NARROW, "east"),
        Host("w", EmulatedLink(1e6, 2e6, 0.001), "west"),
    ),
    regions=(Region("east", TRUNK), Region("west")),
)


def test_path_uses_trunks_only_between_regions() -> None:
    assert NETWORK.way("e1", "e2") == EmulatedPath(8e6, 0.0, 0.0)
    there = NETWORK.way("hub", "e1")
    assert there == EmulatedPath(5e6, 0.04, pytest.approx(0.01))
    back = NETWORK.way("e1", "hub")
    # The trunk's losses come before its rate counts the packets.
    assert back.rate_bps == pytest.approx(8e6 * 0.99)
    assert NETWORK.way("w", "e1") == EmulatedPath(pytest.approx(0.99e6), pytest.approx(0.041), pytest.approx(0.01))


def test_invalid_regions_are_refused() -> None:
    with pytest.raises(UsageError, match="the same name"):
        EmulatedNetwork((Host("a"),), regions=(Region("a"),))
    with pytest.raises(UsageError, match="region 'b' that does not exist"):
        EmulatedNetwork((Host("a", region="b"),))
    with pytest.raises(UsageError, match="above 0"):
        EmulatedNetwork((Host("a"),), regions=(Region("b", EmulatedLink(up_bps=-1)),))
    with pytest.raises(UsageError, match="no host and no region"):
        NETWORK.link("north")


def test_behind_replaces_one_link_only() -> None:
    changed = NETWORK.behind("east", NARROW).behind("w", TRUNK)
    assert (changed.link("east"), changed.link("w"), changed.link("e1")) == (NARROW, TRUNK, NARROW)
    assert NETWORK.link("east") == TRUNK


def test_every_link_is_measured_as_the_narrowest_of_its_path() -> None:
    east, middle, west = (gauge_of(region).name for region in ("east", None, "west"))
    assert pairs(NETWORK) == [("e1", "e2"), ("e2", "e1"), ("w", west), (west, "w"), (east, "hub"), ("hub", east)]
    bare = EmulatedNetwork((Host("a", NARROW), Host("b", TRUNK), Host("c", TRUNK)))
    assert pairs(bare) == [("a", middle), (middle, "a"), ("b", middle), (middle, "b"), ("c", middle), (middle, "c")]
    assert pairs(EmulatedNetwork((Host("a"), Host("b")))) == []
    whole = with_gauges(NETWORK)
    for sender, receiver in pairs(NETWORK):
        assert whole.way(sender, receiver).rate_bps is not None


def test_disjoint_pairs_are_measured_at_once() -> None:
    many = EmulatedNetwork(tuple(Host(f"p{n}", NARROW) for n in range(10)))
    made = batches(many, pairs(many))
    assert sorted(pair for batch in made for pair in batch) == sorted(pairs(many))
    assert len(made) < len(pairs(many))
    for batch in made:
        names = [name for pair in batch for name in pair]
        assert len(set(names)) == len(names)
    # Trunks at the limit of one machine are measured alone.
    assert all(
        len(batch) == 1
        for batch in batches(NETWORK, pairs(NETWORK))
        if "hub" in {name for pair in batch for name in pair}
    )
    wide = EmulatedNetwork(tuple(Host(f"p{n}", EmulatedLink(90e6, 90e6)) for n in range(10)))
    assert all(len(batch) == 1 for batch in batches(wide, pairs(wide)))
    assert batches(many, []) == []


def test_bursts_on_a_trunk_count() -> None:
    bursts = NETWORK.behind("east", replace(TRUNK, loss=Bursts(0.01, 0.19)))
    assert bursts.way("hub", "e1").loss == pytest.approx(0.05)


def reaches(net: Namespaces, pair: Pair, within_s: float = 20.0) -> bool:
    """Whether packets arrive and are answered: a closed port is refused at once."""
    try:
        net.connect(pair[0], (net.address(pair[1]), 9), within_s).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        return False
    raise AssertionError("a process listens")


CUT_S = 0.5
"""Time without packets that counts as a cut."""
RATES = EmulatedNetwork(
    (Host("hub"), Host("e1", NARROW, "east"), Host("e2", NARROW, "east"), Host("w", EmulatedLink(), "west")),
    regions=(Region("east", EmulatedLink(4e6, 2e6)), Region("west", EmulatedLink(3e6, 3e6))),
)


@pytest.mark.root
def test_hosts_and_trunks_are_cut_and_healed() -> None:
    with namespaces(RATES) as net:
        every = [(one, other) for one in net.network.hosts for other in net.network.hosts if one != other]
        assert all(reaches(net, (one.name, other.name)) for one, other in every)
        net.cut("east")
        assert not reaches(net, ("hub", "e1"), CUT_S)
        assert reaches(net, ("e1", "e2"))
        assert reaches(net, ("hub", "w"))
        net.heal("east")
        net.cut("e1")
        assert not reaches(net, ("e1", "e2"), CUT_S)
        assert reaches(net, ("hub", "e2"))
        net.heal("e1")
        assert reaches(net, ("e1", "hub"))


@pytest.mark.root
def test_trunks_are_shaped_both_ways_and_anew() -> None:
    with namespaces(RATES) as net:
        assert [_rate(net, device) for device in ("trunk0", "core0", "core1", "port1")] == [
            "4Mbit",
            "2Mbit",
            "3Mbit",
            "8Mbit",
        ]
        net.reshape("east", EmulatedLink(1e6, 6e6))
        assert [_rate(net, device) for device in ("trunk0", "core0")] == ["1Mbit", "6Mbit"]
        assert net.network.link("east") == EmulatedLink(1e6, 6e6)
        net.reshape("east", EmulatedLink())
        assert _rate(net, "trunk0") == ""


def _rate(net: Namespaces, device: str) -> str:
    words = ["nsenter", f"--net=/proc/{net._switch}/ns/net", "tc", "qdisc", "show", "dev", device]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return shown.partition(" rate ")[2].partition(" ")[0]


@pytest.mark.root
def test_trunk_is_measured_apart_from_its_hosts() -> None:
    """The rate is the trunk's own, not the narrower hosts'. On a busy machine it may be too low, never too high."""
    with namespaces(RATES.behind("e1", EmulatedLink(1e6, 1e6)).behind("e2", EmulatedLink(1e6, 1e6))) as net:
        before = len(net.network.hosts)
        up, down = measure(net, [(gauge_of("east").name, "hub"), ("hub", gauge_of("east").name)], packets=200)
        assert (up.asked.rate_bps, down.asked.rate_bps) == (4e6, 2e6)
        assert up.rate_bps is not None
        assert down.rate_bps is not None
        assert 1.1e6 < up.rate_bps < 4.3e6
        assert 1.1e6 < down.rate_bps < 2.2e6
        assert len(net.network.hosts) == before
        # An additional host for a while, repeatedly.
        for _ in range(2):
            with net.gauge("west") as gauge:
                assert reaches(net, ("hub", gauge))
                assert reaches(net, (gauge, "w"))
