"""Versions for clusters: full versions and deltas, sums over versions, and the traffic over each trunk by the plan."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from netem.emulation import calibration
from netem.emulation.tables import filled
from netem.lab.experiments import clusters
from netem.lab.experiments.clusters import DELTA, FULL, Parameters, at_scale, entries, states, whole
from netem.lab.model_prediction import FeedTree
from netem.lab.network_tables import network_of
from netem.lab.scenario import cases
from netem.lab.scenario_run import load
from p2pcast.ground.errors import UsageError

REGIONS: dict[str, Any] = {
    "regions": [{"name": "east", "rate": "40mbit"}, {"name": "west", "rate": "40mbit"}],
    "hosts": [
        {"name": "hub", "rate": "80mbit"},
        {"name": "e", "count": 2, "region": "east", "rate": "80mbit"},
        {"name": "w", "region": "west", "rate": "80mbit"},
    ],
}


def test_full_versions_follow_full_every() -> None:
    made = list(islice(states(Parameters(0.5, 6, full_every=3)), 8))
    assert [kind for kind, _ in made] == [FULL, FULL, FULL, DELTA, DELTA, FULL, DELTA, DELTA], (
        "the second is a warm-up version"
    )
    words = [np.concatenate([row for _, _, row in tensors.values()]) for _, tensors in made]
    for (kind, _), old, new in zip(made[1:], words, words[1:], strict=False):
        changed = np.count_nonzero(old != new) / old.size
        assert changed > 0.9 if kind == FULL else changed == pytest.approx(0.02, rel=0.1)
        if kind == DELTA:
            assert set(np.unique((new - old)[old != new])) == {1, 65535}


def test_without_full_every_only_the_first_version_is_full() -> None:
    assert [kind for kind, _ in islice(states(Parameters(0.25, 3)), 4)] == [FULL, DELTA, DELTA, DELTA]


def test_warm_up_versions_are_full_if_some_versions_are() -> None:
    made = islice(states(Parameters(0.25, 6, full_every=3, warm_up=2)), 6)
    assert [kind for kind, _ in made] == [FULL, FULL, FULL, FULL, DELTA, DELTA]
    assert [kind for kind, _ in islice(states(Parameters(0.25, 6, full_every=3, warm_up=0)), 3)] == [FULL, FULL, DELTA]


def test_region_entries_count_links_from_outside() -> None:
    network = network_of({"network": REGIONS})
    assert entries(FeedTree(network, {"e1": "hub", "e2": "e1", "w": "e2"})) == {"east": 1, "west": 1}
    assert entries(FeedTree(network, {"e1": "hub", "e2": "hub", "w": "hub"})) == {"east": 2, "west": 1}


def row(kind: str, size: int) -> dict[str, Any]:
    times = {"received_s": 1.0, "all_s": 2.0, "background_s": 0.01, "blocking_s": 2.0, "busy": 0.5}
    return {"kind": kind, "bytes": size, "bytes_east": 2 * size, **times}


def test_bytes_and_standing_still_are_summed() -> None:
    rows = [row(FULL, 1 << 20), row(DELTA, 1 << 10)]
    summed = whole(rows, Parameters(1.0, 2))
    assert (summed["bytes"], summed["bytes_east"]) == ((1 << 20) + (1 << 10), (2 << 20) + (2 << 10))
    assert summed["of_full"] == pytest.approx(0.5005, abs=1e-4)
    assert (summed["blocking_s"], summed["background_s"], summed["background_share"]) == (4.0, 0.02, 0.005)


def test_the_papers_sizes_are_marked_and_cross_trunks_as_ours_did() -> None:
    tree = FeedTree(network_of({"network": REGIONS}), {"e1": "hub", "e2": "hub", "w": "hub"})
    given = Parameters(1.0, 2, paper_gib=1.0, paper_gbps=10)
    made = list(at_scale(tree, [row(DELTA, 1 << 10)], given))
    assert [each["bytes"] for each in made] == [1 << 30, 1 << 20]
    assert all(each["simulated"] and each["bytes_east"] == 2 * each["bytes"] for each in made)
    assert made[0]["received_s"] > 8 * (1 << 30) / 10e9


@pytest.mark.parametrize(
    "wrong", [{"state_mib": 0}, {"versions": 0}, {"full_every": -1}, {"warm_up": -1}, {"changed_share": 1.0}]
)
def test_invalid_parameters_are_reported(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        next(iter(clusters.results({"network": REGIONS, "parameters": {"state_mib": 1, "versions": 2, **wrong}})))


def test_scenarios_have_valid_parameters() -> None:
    for name in ("sparrowrl-relay", "fireworks-clusters"):
        for case in cases(load(name)):
            filled(Parameters, case.argument["parameters"], "parameters").check()


@pytest.mark.root
def test_a_relay_spares_the_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this kernel, with rates alone; two peers in one region, first one below the other, then both fed by
    the hub.
    """
    monkeypatch.setattr(calibration, "measure", lambda *_: [])
    monkeypatch.setattr(clusters, "IDLE_S", 0.0)
    crossed = {}
    hosts = [{**host, "rate": "40mbit"} for host in REGIONS["hosts"] if host["name"] != "w"]
    network = {"regions": REGIONS["regions"][:1], "hosts": hosts}
    for chains in (1, 2):
        parameters = {"state_mib": 1, "versions": 2, "full_every": 1, "chains": chains}
        said = list(clusters.results({"network": network, "events": [], "parameters": parameters}))
        rows = [each["row"] for each in said if "row" in each]
        assert [each["kind"] for each in rows] == [FULL, FULL, "all"]
        crossed[chains] = [each["bytes_east"] / each["bytes"] for each in rows[:2]]
    assert all(share < 1.5 for share in crossed[1])
    assert all(share > 1.9 for share in crossed[2])
