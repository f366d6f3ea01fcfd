"""The whole RL run of the lab: its parameters, and a short run in this kernel with rates alone."""

from __future__ import annotations

from typing import Any

import pytest

from netem.emulation import calibration
from netem.emulation.tables import filled
from netem.lab.experiments import rl_run
from netem.lab.experiments.rl_run import Parameters
from netem.lab.scenario import cases
from netem.lab.scenario_run import load
from p2pcast.ground.errors import UsageError

NETWORK: dict[str, Any] = {
    "regions": [{"name": "east", "rate": "20mbit"}, {"name": "west", "rate": "20mbit"}],
    "hosts": [{"name": "hub"}, {"name": "e", "region": "east"}, {"name": "w", "region": "west"}],
}
QUICK = {
    "layers": 1, "tokens": 8, "tokens_per_s": 64.0, "slots": 4, "groups": 2, "group_size": 2, "train_s": 0.5,
    "warm_up": 1, "before_s": 4.0, "cut_s": 4.0, "after_s": 8.0,
}  # fmt: skip


def argument(**parameters: Any) -> dict[str, Any]:
    return {"network": NETWORK, "events": [], "parameters": {"cut": "west", **parameters}}


@pytest.mark.parametrize(
    "wrong", [{"systems": ["swarm"]}, {"systems": []}, {"cut": "north"}, {"group_size": 1}, {"cut_s": 0}, {"tokens": 0}]
)
def test_invalid_parameters_are_reported(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        next(iter(rl_run.results(argument(**wrong))))


def test_the_scenario_has_valid_parameters() -> None:
    for case in cases(load("rl-run")):
        filled(Parameters, case.argument["parameters"], "parameters").check()


@pytest.mark.root
@pytest.mark.prove
def test_both_methods_lose_nothing_while_a_site_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes of both runs, in this kernel."""
    monkeypatch.setattr(calibration, "measure", lambda *_: [])
    said = [each["row"] for each in rl_run.results(argument(**QUICK)) if "row" in each]
    rows = [row for row in said if "gain" not in row]
    assert [(row["system"], row["phase"]) for row in rows] == [
        (system, phase) for system in ("p2pcast", "dense star") for phase in ("before", "cut", "after", "all")
    ]
    for row in rows[3::4]:
        assert row["steps"] > 0
        assert row["staleness_max"] <= row["bound"] == 1
        assert row["lost"] == 0
        assert row["tokens_per_s"] > 0
        assert row["caught_up_s"] is not None, "the site that was cut off comes back"
    ours, star = (row["version_bytes"] for row in rows[3::4])
    assert ours < star / 10
