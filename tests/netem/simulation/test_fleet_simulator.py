"""The simulated fleet: results for cases with known answers, and the hub's decisions under churn."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from netem.bench.commands.hub_commands import plan
from netem.commands.simulate import simulate as command
from netem.simulation.fleet_simulator import FleetEvents, simulate

CALM = FleetEvents(peers=60, regions=1, versions=5, uplink_bps=3e8, deaths=0, slowdowns=0)


def test_undisturbed_fleet_takes_pipeline_time_without_moves() -> None:
    results = simulate(CALM)
    assert len(results) == CALM.versions
    for result in results:
        # 20 hops of a piece and half a round trip.
        assert 1.0 < result.t99_s / result.ideal_s <= result.last_s / result.ideal_s < 1.12
        assert (result.moved, result.unfinished) == (0, 0)


def test_the_same_seed_is_the_same_run() -> None:
    scenario = FleetEvents(peers=80, versions=3, uplink_bps=8e8, deaths=0.2, slowdowns=0.1)
    assert simulate(scenario, 7) == simulate(scenario, 7)
    assert simulate(scenario, 7) != simulate(scenario, 8)


@pytest.mark.parametrize(("silent", "slowdowns"), [(0.0, 0.0), (1.0, 0.0), (0.5, 0.0025)])
def test_a_thousand_peers_under_churn(silent: float, slowdowns: float) -> None:
    """Simulated seconds, the same on every machine. The first two versions measure the rates."""
    results = simulate(FleetEvents(versions=8, silent=silent, slowdowns=slowdowns), 1)
    assert sum(r.deaths for r in results) > 10
    assert all(r.t99_s / r.ideal_s <= 1.2 for r in results[2:])
    assert sum(r.moved for r in results) < 10 * sum(r.deaths + r.joins for r in results)


def test_slow_peers_do_not_delay_others() -> None:
    results = simulate(FleetEvents(peers=300, uplink_bps=2e9, versions=8, deaths=0, slowdowns=0.02, slow_s=1e6), 3)
    slowed = sum(r.slowdowns for r in results)
    assert slowed > 3
    assert all(r.unfinished <= slowed for r in results)


def test_the_commands_print_documents() -> None:
    run = CliRunner().invoke(command, ["--peers", "30", "--versions", "3", "--uplink", "300mbit", "--json"])
    document = json.loads(run.stdout)
    assert document["peers"] == 30
    assert len(document["rows"]) == 3
    assert document["t99_over_ideal"]["median"] >= 1
    assert "÷ ideal" in CliRunner().invoke(command, ["--peers", "30", "--versions", "3", "--uplink", "300mbit"]).stdout
    measured = json.loads(CliRunner().invoke(plan, ["--peers", "50", "--json"]).stdout)
    assert [row["what"] for row in measured["rows"]][:2] == ["plan from nothing", "plan anew"]


def test_chains_adapt_to_measured_rates_and_payload_size() -> None:
    """Half as fast as assumed, the fleet begins as one chain of 32: too long for 8 MiB, and good enough for 64."""
    small, large = (
        simulate(FleetEvents(32, 1, 6, payload_bytes=mib << 20, uplink_bps=1.5e8, peer_bps=5e7, deaths=0, slowdowns=0))
        for mib in (8, 64)
    )
    assert [result.last_s / result.ideal_s > 1.2 for result in small] == [True] * 3 + [False] * 3
    assert all(result.last_s / result.ideal_s < 1.05 and result.moved == 0 for result in large)
