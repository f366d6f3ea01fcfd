"""Who is struck, and what the simulator says of a fault at the paper's scale."""

from __future__ import annotations

import pytest

from netem.lab.experiments.failures import Given, at_scale, longest_chain
from netem.lab.experiments.fanout import SHARE
from p2pcast.errors import UsageError

GIVEN = Given(payload_mib=8.0, faults=("none", "kill head", "slow middle"), spare="spare", paper_bytes=1e9)


def test_the_longest_chain_from_its_head_down() -> None:
    assert longest_chain({"a": "hub", "b": "a", "c": "hub", "d": "c", "e": "d"}) == ["c", "d", "e"]


def test_faults_that_there_are() -> None:
    GIVEN.check()
    with pytest.raises(UsageError, match="'melt head'"):
        Given(payload_mib=8.0, faults=("melt head",), spare="spare").check()


@pytest.mark.parametrize("fault", ["kill head", "kill middle", "slow head", "slow middle"])
def test_nobody_waits_for_one_that_fails_in_a_broadcast_of_minutes(fault: str) -> None:
    calm, struck = at_scale(GIVEN, "none", 8), at_scale(GIVEN, fault, 8)
    assert calm is not None
    assert struck is not None
    assert calm["simulated"]
    assert struck["simulated"]
    assert calm["survivors_s"] == pytest.approx(calm["ideal_s"], rel=0.06)
    assert struck["delay_s"] < 0.02 * calm["survivors_s"]


def test_what_the_simulator_knows_nothing_of() -> None:
    assert at_scale(GIVEN, "freeze middle", 8) is None


def test_a_replacement_fetches_the_whole_snapshot() -> None:
    found = at_scale(GIVEN, "kill idle", 8)
    assert found is not None
    assert found["recovery_to_ideal"] == pytest.approx(
        (GIVEN.replaced_after_s + found["ideal_s"] / SHARE) / found["ideal_s"], rel=0.01
    )
    assert "delay_s" not in found
