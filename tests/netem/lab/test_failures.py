"""Who is struck, and what the simulator says of a fault at the paper's scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netem.lab.experiments.failures import DELTAS, NOTHING, OLDER, WHOLE, Given, at_scale, longest_chain
from netem.lab.experiments.fanout import SHARE
from p2pcast.errors import UsageError

GIVEN = Given(payload_mib=8.0, faults=("none", "kill head", "slow middle"), spare="spare", paper_bytes=1e9)


def test_the_longest_chain_from_its_head_down() -> None:
    assert longest_chain({"a": "hub", "b": "a", "c": "hub", "d": "c", "e": "d"}) == ["c", "d", "e"]


def test_faults_that_there_are() -> None:
    GIVEN.check()
    with pytest.raises(UsageError, match="'melt head'"):
        Given(payload_mib=8.0, faults=("melt head",), spare="spare").check()


def scaled(fault: str, given: Given = GIVEN) -> dict[tuple[str, str | None], dict[str, Any]]:
    """By what is sent, and what a replacement has."""
    return {(row["sent"], row.get("has")): row for row in at_scale(given, fault, 8)}


@pytest.mark.parametrize("fault", ["kill head", "kill middle", "slow head", "slow middle"])
def test_nobody_waits_for_one_that_fails_in_a_broadcast_of_minutes(fault: str) -> None:
    has = NOTHING if fault.startswith("kill") else None
    calm, struck = scaled("none")[WHOLE, None], scaled(fault)[WHOLE, has]
    assert calm["simulated"]
    assert struck["simulated"]
    assert calm["survivors_s"] == pytest.approx(calm["ideal_s"], rel=0.06)
    assert struck["delay_s"] < 0.02 * calm["survivors_s"]


def test_deltas_take_their_share_of_a_states_time() -> None:
    rows = scaled("none")
    assert rows[DELTAS, None]["ideal_s"] == pytest.approx(GIVEN.delta_share * rows[WHOLE, None]["ideal_s"], abs=0.1)


def test_what_the_simulator_knows_nothing_of() -> None:
    assert list(at_scale(GIVEN, "freeze middle", 8)) == []


def test_a_replacement_fetches_what_it_lacks_at_its_own_rate() -> None:
    rows = scaled("kill idle")
    state_s = 8 * GIVEN.paper_bytes / (GIVEN.paper_peer_bps * SHARE)
    assert set(rows) == {(WHOLE, NOTHING), (DELTAS, NOTHING), (DELTAS, OLDER)}
    for (_, has), row in rows.items():
        fetch_s = state_s * (1.0 if has == NOTHING else GIVEN.behind_share)
        assert row["recovery_s"] == pytest.approx(GIVEN.replaced_after_s + fetch_s, abs=0.06)
        assert row["recovery_to_least"] > 1
        assert "delay_s" not in row


def test_in_mid_broadcast_it_waits_for_that_to_end_but_for_a_trickle() -> None:
    idle, amid = (scaled(fault)[WHOLE, NOTHING]["recovery_s"] for fault in ("kill idle", "kill head"))
    rest_s = scaled("kill head")[WHOLE, NOTHING]["survivors_s"] - 0.5 * 80.0 - GIVEN.replaced_after_s
    assert 0.98 * rest_s < amid - idle < rest_s
    small = replace(GIVEN, behind_share=1e-6)
    assert scaled("kill head", small)[DELTAS, OLDER]["replaced_s"] < 0.5, "so little comes in the trickle"
