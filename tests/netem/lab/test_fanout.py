"""Shapes of trees, the times of the paper's formula and of the model, and a tree of real sockets."""

from __future__ import annotations

from typing import Any

import pytest

from netem.lab.experiments.fanout import SHARE, Parameters, finished, predicted_s, rates, results, shape, simulated
from netem.lab.network_tables import network_of
from p2pcast.ground.errors import UsageError
from topology.plan_tree import ROOT

PEERS = ["a", "b", "c", "d", "e"]


def test_shapes() -> None:
    assert shape("star", PEERS, 2) == dict.fromkeys(PEERS, "hub")
    assert shape("tree", PEERS, 2) == {"a": "hub", "b": "a", "c": "a", "d": "b", "e": "b"}
    assert shape("chain", PEERS, 2) == {"a": "hub", "b": "hub", "c": "a", "d": "b", "e": "c"}


def made(system: str, peers: int, chains: int = 0) -> dict[str, Any]:
    row = {"system": system, "peers": peers, "payload_bytes": 12_500_000, "all_s": 4.0}
    return finished(row, Parameters(system, 1.0, chains=chains), 300e6, 100e6)


def test_the_papers_formula_of_each_shape() -> None:
    assert made("star", 2)["theirs_s"] == 1.0
    assert made("star", 9)["theirs_s"] == 3.0
    assert made("chain", 9)["theirs_s"] == 1.0
    assert made("p2pcast", 9, chains=6)["theirs_s"] == 2.0
    assert made("tree", 9)["theirs_s"] == 2.0
    assert made("star", 9)["over_theirs"] == pytest.approx(4 / 3, abs=1e-4)


def test_prediction_subtracts_headers() -> None:
    star = predicted_s(dict.fromkeys(PEERS, ROOT), 12_500_000, 100e6, 100e6)
    assert star == pytest.approx(5 / SHARE, rel=0.02)
    chain = predicted_s({"a": ROOT, "b": "a", "c": "b"}, 12_500_000, 100e6, 100e6)
    assert 1 / SHARE < chain < 1.03 / SHARE


def test_paper_scale_rows_are_marked_simulated() -> None:
    row = simulated(Parameters("p2pcast", 8.0), 9)
    assert row["simulated"] is True
    assert row["peers"] == 9
    assert 1.0 < row["all_over_ideal"] < 1.1
    assert simulated(Parameters("star", 8.0), 9)["all_over_ideal"] == pytest.approx(3 / SHARE, rel=0.01)


def argument(count: int, **parameters: Any) -> dict[str, Any]:
    hosts = [{"name": "hub", "rate": "60mbit"}, {"name": "p", "count": count, "rate": "20mbit"}]
    return {"network": {"hosts": hosts}, "events": [], "parameters": {"payload_mib": 0.25, "rounds": 1, **parameters}}


def test_peers_have_to_be_alike() -> None:
    network = network_of(argument(2))
    assert rates(network) == (60e6, 20e6)
    with pytest.raises(UsageError, match="identical peers"):
        rates(network_of({"network": {"hosts": [{"name": "hub", "rate": "60mbit"}, {"name": "p"}]}}))


@pytest.mark.root
def test_a_tree_of_sockets_on_a_real_network() -> None:
    said = list(results(argument(3, system="tree", simulate=[64], simulate_at=3)))
    assert said[0]["off"] == []
    rows = [each["row"] for each in said[1:]]
    assert [(row["system"], row["peers"], row["simulated"]) for row in rows] == [("tree", 3, False), ("tree", 64, True)]
    # Two peers share the uplink of the first one.
    assert rows[0]["all_over_ideal"] > 1.9
