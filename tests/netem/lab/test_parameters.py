"""Invalid parameters give one line that names the key, before a kernel is booted, a network is made or a model is
trained.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from netem.lab import scenario_run
from netem.lab.scenario import cases, parse
from netem.lab.scenario_run import checked, known, load
from p2pcast.ground.errors import UsageError


@pytest.mark.parametrize("name", known())
def test_included_scenarios_have_valid_parameters(name: str) -> None:
    scenario = load(name)
    for case in cases(scenario):
        checked(scenario.experiment, case)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("pulse-codecs", "rounds", 0),
        ("pulse-codecs", "rates", []),
        ("pulse-codecs", "rates", ["fast"]),
        ("pulse-codecs", "formats", []),
        ("pulse-codecs", "formats", ["zip"]),
        ("pulse-codecs", "copies", 0),
        ("pulse-codecs", "limit_s", 1000),
        ("pulse-codecs", "paper_bytes", math.inf),
        ("pulse-fast-path", "rounds", 0),
        ("pulse-fast-path", "rates", []),
        ("pulse-fast-path", "behind", 8),
        ("pulse-fast-path", "learning_rate", math.nan),
        ("pulse-fast-path", "paper_bps", 0),
        ("wan-stripes", "stripes", []),
        ("wan-stripes", "stripes", [0]),
        ("wan-stripes", "congestion", []),
        ("wan-stripes", "payload_mib", 0),
        ("wan-stripes", "rounds", 0),
        ("echo2-chains", "rounds", 0),
        ("echo2-chains", "payload_mib", -1),
        ("echo2-chains", "system", "pigeons"),
        ("echo2-chains", "simulate", [0]),
        ("pulse-chain", "hidden", 0),
        ("pulse-chain", "group", 0),
        ("pulse-chain", "points", [0]),
        ("sparrowrl-bandwidth", "sends", []),
        ("sparrowrl-bandwidth", "sends", [""]),
        ("sparrowrl-bandwidth", "limit", math.inf),
        ("fireworks-clusters", "paper_gbps", -1),
        ("fireworks-clusters", "versions", 0),
        ("whole-state", "rounds", 0),
        ("echo2-failures", "faults", ["yawn"]),
        ("regions", "rounds", 0),
        ("fault", "rounds", 5),
        ("smoke", "speed", 1),
    ],
)
def test_invalid_parameters_are_refused_by_name(name: str, key: str, value: object) -> None:
    scenario = load(name)
    said = "an event is set for version 6: there are 5" if name == "fault" else rf"parameters\..*{key}"
    for case in cases(scenario):
        parameters = {**case.argument["parameters"], key: value}
        with pytest.raises(UsageError, match=f"case {case.number}: .*{said}"):
            checked(scenario.experiment, replace(case, argument={**case.argument, "parameters": parameters}))


def test_invalid_parameters_make_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario_run, "prepared", lambda *_: pytest.fail("a network was made"))
    with pytest.raises(UsageError, match=r"case 1: parameters\.rounds is 0: it must be from 1 to"):
        scenario_run.run(load("pulse-codecs", {"rounds": 0}), "rate")


def test_missing_network_is_reported() -> None:
    scenario = parse("mine", 'what = "a thing"\nminutes = 1\nexperiment = "broadcast"\n[parameters]\npayload_mib = 1\n')
    with pytest.raises(UsageError, match="hosts is missing"):
        scenario_run.run(scenario, "rate")
