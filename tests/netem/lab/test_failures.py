"""The chosen victim, and the simulator's prediction of a fault at the paper's scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netem.lab.experiments.failures import DELTAS, NOTHING, OLDER, WHOLE, Parameters, at_scale, longest_chain
from netem.lab.experiments.fanout import SHARE
from p2pcast.ground.errors import UsageError

GIVEN = Parameters(payload_mib=8.0, faults=("none", "kill head", "slow middle"), spare="spare", paper_bytes=1e9)


def test_the_longest_chain_from_its_head_down() -> None:
    assert longest_chain({"a": "hub", "b": "a", "c": "hub", "d": "c", "e": "d"}) == ["c", "d", "e"]


def test_unknown_fault_is_refused() -> None:
    GIVEN.check()
    with pytest.raises(UsageError, match="'melt head'"):
        Parameters(payload_mib=8.0, faults=("melt head",), spare="spare").check()


def scaled(fault: str, given: Parameters = GIVEN) -> dict[tuple[str, str | None], dict[str, Any]]:
    """By the kind of payload, and by the version that a replacement has."""
    return {(row["sent"], row.get("has")): row for row in at_scale(given, fault, 8)}


@pytest.mark.parametrize("fault", ["kill head", "kill middle", "slow head", "slow middle"])
def test_survivors_do_not_wait_for_a_failed_peer(fault: str) -> None:
    has = NOTHING if fault.startswith("kill") else None
    calm, struck = scaled("none")[WHOLE, None], scaled(fault)[WHOLE, has]
    assert calm["simulated"]
    assert struck["simulated"]
    assert calm["survivors_s"] == pytest.approx(calm["ideal_s"], rel=0.06)
    assert struck["delay_s"] < 0.02 * calm["survivors_s"]


def test_deltas_take_their_share_of_a_states_time() -> None:
    rows = scaled("none")
    assert rows[DELTAS, None]["ideal_s"] == pytest.approx(GIVEN.delta_share * rows[WHOLE, None]["ideal_s"], abs=0.1)


def test_unmodelled_faults_have_no_rows() -> None:
    assert list(at_scale(GIVEN, "freeze middle", 8)) == []


def test_replacement_fetches_at_its_own_rate() -> None:
    rows = scaled("kill idle")
    state_s = 8 * GIVEN.paper_bytes / (GIVEN.paper_peer_bps * SHARE)
    assert set(rows) == {(WHOLE, NOTHING), (DELTAS, NOTHING), (DELTAS, OLDER)}
    for (_, has), row in rows.items():
        fetch_s = state_s * (1.0 if has == NOTHING else GIVEN.behind_share)
        assert row["recovery_s"] == pytest.approx(GIVEN.replaced_after_s + fetch_s, abs=0.06)
        assert row["recovery_to_least"] > 1
        assert "delay_s" not in row


def test_replacement_mostly_waits_for_the_end_of_a_broadcast() -> None:
    idle, amid = (scaled(fault)[WHOLE, NOTHING]["recovery_s"] for fault in ("kill idle", "kill head"))
    rest_s = scaled("kill head")[WHOLE, NOTHING]["survivors_s"] - 0.5 * 80.0 - GIVEN.replaced_after_s
    assert 0.98 * rest_s < amid - idle < rest_s
    small = replace(GIVEN, behind_share=1e-6)
    assert scaled("kill head", small)[DELTAS, OLDER]["replaced_s"] < 0.5, (
        "catch-up traffic is limited during a broadcast"
    )
