"""Parameters that make no sense: one line that names the key, before a kernel is booted, a network is made or anything is trained."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from netem.lab import run
from netem.lab.run import checked, known, load
from netem.lab.scenario import cases, parse
from p2pcast.errors import UsageError


@pytest.mark.parametrize("name", known())
def test_what_comes_along_makes_sense(name: str) -> None:
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
def test_what_makes_no_sense_is_refused_by_its_name(name: str, key: str, value: object) -> None:
    scenario = load(name)
    said = "an event befalls version 6: there are 5" if name == "fault" else rf"parameters\..*{key}"
    for case in cases(scenario):
        parameters = {**case.argument["parameters"], key: value}
        with pytest.raises(UsageError, match=f"case {case.number}: .*{said}"):
            checked(scenario.experiment, replace(case, argument={**case.argument, "parameters": parameters}))


def test_nothing_is_made_for_what_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "prepared", lambda *_: pytest.fail("something was made"))
    with pytest.raises(UsageError, match=r"case 1: parameters\.rounds is 0: it must be from 1 to"):
        run.run(load("pulse-codecs", {"rounds": 0}), "rate")


def test_an_experiment_that_needs_a_network_says_so() -> None:
    scenario = parse("mine", 'what = "a thing"\nminutes = 1\nexperiment = "broadcast"\n[parameters]\npayload_mib = 1\n')
    with pytest.raises(UsageError, match="hosts is missing"):
        run.run(scenario, "rate")
